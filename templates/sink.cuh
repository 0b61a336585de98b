// Storing a head: where it was read, to a fresh output or to a slot of a cache; as it is, or scaled.

// The given scale of a head, if it `exists`, else 1: the value of one unit. q and k after the last sequence are zeros,
// whatever the scale is. Arguments: `Params`; kernels without HEAD_SCALES have no strides.
template <typename Arguments>
__device__ __forceinline__ float scale_of(
    const Arguments& p, const Head& head, const Row& row, bool exists = true
) {
    if constexpr (!CONVERTS) return 1.0f;
    const float* scale = head.of(p.scale);
    if constexpr (HEAD_SCALES) {
        if (!exists || (PACKED && row.spare && !head.is_v)) return 1.0f;
        const ScaleStrides stride = head.of(p.scale_strides);
        if (scale) scale += stride.batch.step(row.batch) + stride.head.step(head.index);
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

// Where and how the heads of a token are stored, in interleaved PAIRS or halves. Nothing else decides it.
template <bool PAIRS = INTERLEAVED_OUT>
struct Sink {
    const Place& place;                                  // of the token
    const Destination& slot;                             // CACHE: of its k and v
    int lane;

    // Calls `store_one` for the first `count` accesses, with the dims from the lane's first one.
    template <typename Store>
    __device__ __forceinline__ void each(int count, const Store& store_one) const {
        #pragma unroll
        for (int n = 0; n < ACCESSES; ++n)
            if (n < count) store_one(n, dims_to(n, PAIRS, COPY_LANES == 0 || lane < ROTARY_LANES));
    }

    // Stores the first `count` accesses of the lane's part of a head that was read from `source`: access n of x
    // unchanged, or of y times factors[n].
    __device__ __forceinline__ void store(
        const Params& p, const Head& head, const Lane<const T>& source, const Vec<T, VEC>* x, const float* y,
        const float* factors, int count
    ) const {
        const int dim = first_dim(lane, PAIRS);
        const Lane<const T> own = IN_PLACE && PAIRS != INTERLEAVED ? head.input(p, place, dim) : source;
        const auto in_place = [&](int n, int dims) { store_x(const_cast<T*>(own[dims]), x[n]); };
        if (IN_PLACE && (!CACHE || head.is_q)) {
            each(count, in_place);
        } else if ((!CONVERTS && !CACHE) || (COPY_V && !CACHE && !CONVERT_V && head.is_v)) {
            const Lane<T> out = head.output<T>(p, place, dim);
            each(count, [&](int n, int dims) { store_x(out[dims], x[n]); });
        } else if (head.is_q) {
            constexpr int EACH = PER_ITEM<QOut>;
            const Lane<QOut> out = head.output<QOut>(p, place, dim / EACH);
            each(count, [&](int n, int dims) { put(out[dims / EACH], x[n], y + n * VEC, factors[n]); });
        } else {
            if (ROTATE_K && !head.is_v) each(count, in_place);
            if (CACHE && !slot.valid) return;
            constexpr int EACH = PER_ITEM<KvOut>;
            const Lane<KvOut> out = head.output<KvOut>(p, CACHE ? slot.place : place, dim / EACH);
            each(count, [&](int n, int dims) { put(out[dims / EACH], x[n], y + n * VEC, factors[n]); });
            if constexpr (CLEAR_PAGE) {     // NVRTC 12.8 needs the braces: the loop has a lambda
                for (int row = slot.place.token + 1; slot.last && row < PAGE_SIZE; ++row) {
                    const Lane<KvOut> next = head.output<KvOut>(p, {slot.place.batch, row}, dim / EACH);
                    each(count, [&](int, int dims) { store_whole(next[dims / EACH], Vec<KvOut, VEC / EACH>{}); });
                }
            }
        }
    }
};
