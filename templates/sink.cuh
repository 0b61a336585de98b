// Storing a head: where it was read, to a fresh output or to a slot of a cache; as it is, or scaled.

// The given scale of a head, if it `exists`: the value of one unit. Arguments: `Params`; kernels without HEAD_SCALES
// have no strides.
template <typename Arguments>
__device__ __forceinline__ float scale_of(
    const Arguments& p, const Head& head, const Place& place, bool exists = true
) {
    if constexpr (!CONVERTS) return 1.0f;
    const float* scale = head.of(p.scale);
    if constexpr (HEAD_SCALES) {
        if (!exists) return 1.0f;
        const ScaleStrides stride = head.of(p.scale_strides);
        if (scale) scale += stride.batch.step(place.batch) + stride.head.step(head.index);
    }
    return scale ? *scale : 1.0f;
}

// Stores an access of a head: x unchanged, or y scaled where the output has another type.
template <typename Out>
__device__ __forceinline__ void put(Out* address, const Vec<T, VEC>& x, const float* y, float factor) {
    if constexpr (sizeof(Out) == sizeof(T)) {
        store_whole(address, x);
    } else {
        float scaled[VEC];
        #pragma unroll
        for (int i = 0; i < VEC; ++i) scaled[i] = __fmul_rn(y[i], factor);
        Vec<Out, VEC / PER_ITEM<Out>> v;
        pack(scaled, v);
        store_whole(address, v);
    }
}

// Where and how the heads of a token are stored. Nothing else decides it.
struct Sink {
    const Place& place;                                  // of the token
    const Destination& slot;                             // CACHE: of its k and v
    int lane;

    // Stores access n of the lane's part of a head that was read from `source`: x unchanged, or y times factor.
    __device__ __forceinline__ void store_access(
        const Params& p, const Head& head, const Lane<const T>& source, int n, const Vec<T, VEC>& x, const float* y,
        float factor
    ) const {
        const int dim = first_dim(lane, INTERLEAVED_OUT);
        const int dims = dims_to(n, INTERLEAVED_OUT, COPY_LANES == 0 || lane < ROTARY_LANES);
        if (IN_PLACE && (!CACHE || head.is_q)) {
            store_x(const_cast<T*>(source[dims]), x, true);
        } else if constexpr (!CONVERTS && !CACHE) {
            store_x(head.output<T>(p, place, dim)[dims], x, false);
        } else if (COPY_V && !CACHE && head.is_v) {
            store_x(head.output<T>(p, place, dim)[dims], x, false);
        } else if (head.is_q) {
            constexpr int EACH = PER_ITEM<QOut>;
            put(head.output<QOut>(p, place, dim / EACH)[dims / EACH], x, y, factor);
        } else {
            if (ROTATE_K && !head.is_v) store_x(const_cast<T*>(source[dims]), x, true);
            if (CACHE && !slot.valid) return;
            constexpr int EACH = PER_ITEM<KvOut>;
            put(head.output<KvOut>(p, CACHE ? slot.place : place, dim / EACH)[dims / EACH], x, y, factor);
            if constexpr (CLEAR_PAGE)
                for (int row = slot.place.token + 1; slot.last && row < PAGE_SIZE; ++row) {
                    const Place cleared = {slot.place.batch, row};
                    store_whole(head.output<KvOut>(p, cleared, dim / EACH)[dims / EACH], Vec<KvOut, VEC / EACH>{});
                }
        }
    }

    // Stores the first `count` accesses.
    __device__ __forceinline__ void store(
        const Params& p, const Head& head, const Lane<const T>& source, const Vec<T, VEC>* x, const float* y,
        float factor, int count
    ) const {
        #pragma unroll
        for (int n = 0; n < count; ++n) store_access(p, head, source, n, x[n], y + n * VEC, factor);
    }
};
