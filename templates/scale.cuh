// scale: q is multiplied by the number of its token; with DTYPE it is rounded first, as the host's tensor is.
struct Scale {
    float factor;

    __device__ __forceinline__ Scale(const Params& p, const Place& place) {
        const float* found = p.q_factor + p.factor_stride.token.step(place.token);
        if constexpr (!ONE_ROW) found += p.factor_stride.batch.step(place.batch);
        factor = *found;
    }
    static __device__ __forceinline__ void multiply(float (&y)[ELEMENTS], float factor) {
        #pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) y[i] = __fmul_rn(ROUNDING == DTYPE ? rounded(y[i]) : y[i], factor);
    }
    __device__ __forceinline__ void apply(const Head& head, float (&y)[ELEMENTS]) const {
        if (head.is_q) multiply(y, factor);
    }
    // Of the output's gradient. Without a branch it takes fewer registers.
    __device__ __forceinline__ void back(const Head& head, float (&g)[ELEMENTS]) const {
        multiply(g, head.is_q ? factor : 1.0f);
    }
};
