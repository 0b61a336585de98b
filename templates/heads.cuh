// A head: where it lies, a lane's part of it, the projection's bias, and the rotation.

struct Chunks { Vec<T, VEC> x[ACCESSES]; };              // a lane's part of a head

// A lane's first element of a head. lane[dims] is the address of the element `dims` dims further on.
template <typename Element>
struct Lane {
    Element* first;
    Axis dim;

    __device__ __forceinline__ Element* operator[](int dims) const {
        return first + (VEC == 1 ? dim.step(dims) : dims);
    }
};

// Which tensor a head of a token is in: q's heads come first, then k's, then v's. SUMS: before them comes the sum over
// k's heads, a head of k with a negative index. GATED: every second head of q's is a gate, which is copied as v is.
struct Head {
    bool is_q, is_v;
    int tensor, index;                                   // q, k, v: 0, 1, 2; and the head's number in the tensor

    __device__ __forceinline__ Head(const Params& p, int head)
        : is_q((!SUMS || head > 0) && head - SUMS < static_cast<int>(p.q_heads)),
          is_v(COPY_V && head - SUMS >= static_cast<int>(p.q_heads + p.k_heads)), tensor(is_q ? 0 : is_v ? 2 : 1),
          index(head - SUMS - static_cast<int>(is_q ? 0 : is_v ? p.q_heads + p.k_heads : p.q_heads)) {
        if (GATED && is_q && index % 2) is_q = false, is_v = true;
    }
    // The head `heads` further on in the same tensor.
    __device__ __forceinline__ Head(const Head& other, int heads)
        : is_q(other.is_q), is_v(other.is_v), tensor(other.tensor), index(other.index + heads) {}

    __device__ __forceinline__ bool is_gate() const { return GATED && is_v && tensor == 0; }

    // The field of this head's tensor. With two tensors a choice is faster than an index into the arguments.
    template <typename Field>
    __device__ __forceinline__ Field of(const Field (&each)[3]) const {
        return COPY_V ? each[tensor] : is_q ? each[0] : each[1];
    }
    __device__ __forceinline__ Axis of(const Strides (&each)[3], Axis Strides::*axis) const {
        return COPY_V ? each[tensor].*axis : is_q ? each[0].*axis : each[1].*axis;
    }

    // The offset of this head in its tensor.
    __device__ __forceinline__ long long step(const Axis& group, const Axis& in_group) const {
        if (Q_PER_GROUP > 1 && (GATED ? tensor == 0 : is_q))
            return group.step(index / Q_PER_GROUP) + in_group.step(index % Q_PER_GROUP);
        if (KV_PER_GROUP > 1 && !is_q) return group.step(index / KV_PER_GROUP) + in_group.step(index % KV_PER_GROUP);
        return group.step(index);
    }

    template <typename Element>
    __device__ __forceinline__ Lane<Element> in(
        Element* base, const Strides (&strides)[3], const Place& place, int dim
    ) const {
        const Axis group = of(strides, &Strides::group), dims = of(strides, &Strides::dim);
        long long offset = of(strides, &Strides::token).step(place.token);
        if constexpr (!ONE_ROW || PAGE_SIZE) offset += of(strides, &Strides::batch).step(place.batch);
        const Axis in_group = is_q ? strides[0].head : of(strides, &Strides::head);
        offset += step(group, in_group);
        return {base + offset + (VEC == 1 ? dims.step(dim) : dim), dims};
    }

    // LATENT: kv (tensor 1) holds the first part of each head of k, and then v. k_pe (tensor 2) holds the rotated part,
    // which all heads of k share. The forward reads them, and the gradient writes theirs.
    __device__ __forceinline__ Head latent(int& dim) const {
        Head own = *this;
        if (is_v) own.tensor = 1, dim += ROTARY_OFFSET;
        else if (!is_q && dim >= ROTARY_OFFSET) own.tensor = 2, own.index = 0, dim -= ROTARY_OFFSET;
        return own;
    }

    __device__ __forceinline__ Lane<const T> input(const Params& p, const Place& place, int dim) const {
        if constexpr (LATENT && !SUMS) {
            const Head own = latent(dim);
            return own.in(own.of(p.in), p.in_stride, place, dim);
        }
        return in(of(p.in), p.in_stride, place, dim);
    }

    template <typename Out>
    __device__ __forceinline__ Lane<Out> output(const Params& p, const Place& place, int dim) const {
        if constexpr (SUMS) {
            const Head own = latent(dim);
            return own.in(static_cast<Out*>(own.of(p.out)), p.out_stride, place, dim);
        }
        return in(static_cast<Out*>(base_of<GATED>(p)), p.out_stride, place, dim);
    }

    // The output of this head. HAS: GATED; a template, because other kernels have no gate_out.
    template <bool HAS, typename Arguments>
    __device__ __forceinline__ void* base_of(const Arguments& p) const {
        if constexpr (HAS)
            if (is_gate()) return p.gate_out;
        return of(p.out);
    }
};

// ---- a lane's part of a head -------------------------------------------------------------------

// A lane's first dim. Its two chunks are half a head apart; if MIXED, they are neighbours on the interleaved side. A
// lane past the rotary lanes copies.
__device__ __forceinline__ int first_dim(int lane, bool interleaved) {
    if constexpr (ALIKE) return lane / ROTARY_LANES * ROTARY_DIM + lane % ROTARY_LANES * CHUNK;
    if (COPY_LANES == 0 || lane < ROTARY_LANES)
        return ROTARY_OFFSET + lane * CHUNK * (MIXED && interleaved ? CHUNKS : 1);
    const int dim = (lane - ROTARY_LANES) * VEC;
    return dim < ROTARY_OFFSET ? dim : dim + ROTARY_DIM;
}
// The dims from a lane's first one to an access. Two accesses of a lane that copies are half of the rest apart, or, if
// ALIKE, as those of a lane that rotates.
__device__ __forceinline__ constexpr int dims_to(int access, bool interleaved, bool rotary = true) {
    if (!ALIKE && !rotary) return access * (REST / 2);
    const int chunk = access / (CHUNK / VEC), i = access % (CHUNK / VEC);
    return chunk * (MIXED && interleaved ? CHUNK : ROTARY_DIM / 2) + i * VEC;
}

// Streaming accesses would cost up to 15 % out of place, 5 to 12 % with a norm, and up to 3 % in place.
__device__ __forceinline__ void store_x(T* address, const Vec<T, VEC>& v) {
    IN_PLACE || COPY_V || NORM ? store_whole(address, v) : store(address, v);
}

// A lane that copies may have fewer accesses; behind them are zeros.
__device__ __forceinline__ Chunks load_head(const Lane<const T>& lane, bool rotary = true, int accesses = ACCESSES) {
    Chunks chunks = {};
    #pragma unroll
    for (int n = 0; n < ACCESSES; ++n)
        if (n < accesses) chunks.x[n] = load_global<T, VEC>(lane[dims_to(n, INTERLEAVED, rotary)]);
    return chunks;
}

// Asks for the accesses of a head to be in L2 when they are loaded. Elsewhere than on sm_90 registers would spill.
__device__ __forceinline__ void prefetch_head(const Lane<const T>& lane, bool rotary, int accesses, bool pairs) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    #pragma unroll
    for (int n = 0; n < ACCESSES; ++n)
        if (n < accesses) asm volatile("prefetch.global.L2 [%0];" :: "l"(lane[dims_to(n, pairs, rotary)]));
#endif
}

__device__ __forceinline__ void unpack_head(const Chunks& chunks, float* x) {
    #pragma unroll
    for (int n = 0; n < ACCESSES; ++n) unpack(chunks.x[n], x + n * VEC);
}
__device__ __forceinline__ void pack_head(const float* y, Chunks& chunks) {
    #pragma unroll
    for (int n = 0; n < ACCESSES; ++n) pack(y + n * VEC, chunks.x[n]);
}

// Rounds values with the same instructions as a store of T.
template <int COUNT>
__device__ __forceinline__ void round_all(float (&x)[COUNT]) {
    #pragma unroll
    for (int i = 0; i < COUNT; i += 2) round_pair(x[i], x[i + 1], T{});
}

// ---- the projection's bias ---------------------------------------------------------------------

// Adds a head's bias to the first `count` accesses of a lane's part of it, and rounds the sums to T. HAS: ADDED_BIAS; a
// template, as in `factor_of`.
template <bool HAS, int COUNT, typename Arguments>
__device__ __forceinline__ void add_bias(
    const Arguments& p, const Head& head, int lane, bool rotary, int count, Vec<T, VEC>* x
) {
    if constexpr (HAS) {
        const Lane<const T> bias = head.in(head.of(p.added), p.added_stride, {}, first_dim(lane, INTERLEAVED));
        #pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            if (n >= count) continue;
            float sum[VEC], own[VEC];
            unpack(x[n], sum);
            unpack(load_kept<T, VEC>(bias[dims_to(n, INTERLEAVED, rotary)]), own);
            #pragma unroll
            for (int i = 0; i < VEC; ++i) sum[i] = __fadd_rn(sum[i], own[i]);
            pack(sum, x[n]);
        }
    }
}

// ---- the rotation ------------------------------------------------------------------------------

// a * b + c * d. Each product and the sum are rounded, to fp32 or to T; or the first product is not rounded,
// as in torch's complex multiply and addcmul, which are contracted on a GPU.
__device__ __forceinline__ float sum_of_products(float a, float b, float c, float d) {
    if constexpr (ROUNDING == FP32) return __fadd_rn(__fmul_rn(a, b), __fmul_rn(c, d));
    else if constexpr (ROUNDING == DTYPE) return __fadd_rn(rounded(__fmul_rn(a, b)), rounded(__fmul_rn(c, d)));
    else return __fmaf_rn(a, b, __fmul_rn(c, d));
}
__device__ __forceinline__ float sum_of_products(double a, double b, double c, double d) {
    return static_cast<float>(__fma_rn(a, b, __dmul_rn(c, d)));
}

// Rotates x, a lane's part of a head, to y; BACK: by negative angles. With DTYPE the store rounds the sums too.
template <bool BACK = INVERSE, typename Turns>
__device__ __forceinline__ void turn(const float* x, float* y, const Turns& turns) {
    constexpr bool OUT = REORDERS ? INTERLEAVED : INTERLEAVED_OUT;
    #pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const Turn turn = turns.of(i);
        const Real x0 = x[INTERLEAVED ? 2 * i : i], x1 = x[INTERLEAVED ? 2 * i + 1 : PAIRS + i];
        const Real sin0 = BACK ? -turn.sin1 : turn.sin0;
        const Real sin1 = BACK ? -turn.sin0 : turn.sin1;
        y[OUT ? 2 * i : i] = ROUNDING == ADDCMUL ? sum_of_products(-x1, sin0, x0, turn.cos0)
                                                 : sum_of_products(x0, turn.cos0, -x1, sin0);
        y[OUT ? 2 * i + 1 : PAIRS + i] = sum_of_products(x0, sin1, x1, turn.cos1);
    }
}

// ---- the scale of q ----------------------------------------------------------------------------

// The number by which q is multiplied at a token. HAS: SCALES_Q; a template, because other kernels have no such
// arguments.
template <bool HAS, typename Arguments>
__device__ __forceinline__ float factor_of(const Arguments& p, const Place& place) {
    if constexpr (HAS) {
        const float* factor = p.q_factor + p.factor_stride.token.step(place.token);
        if constexpr (!ONE_ROW) factor += p.factor_stride.batch.step(place.batch);
        return *factor;
    }
    return 1.0f;
}

// Multiplies a lane's part of a head of q; with DTYPE it is rounded first, as the host's tensor is.
template <int COUNT = ACCESSES * VEC>
__device__ __forceinline__ void scale_all(float* y, float factor) {
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) y[i] = __fmul_rn(ROUNDING == DTYPE ? rounded(y[i]) : y[i], factor);
}
