// Latent attention: what is not one head of q, k or v in, and one out.

// Whether a lane stores its part of a head as of q and k elsewhere. A head of v is copied by `copy_value`. SUMS: the
// rotary lanes store the sum over k's heads, and the others store the rest of each head.
__device__ __forceinline__ bool stores(const Head& head, bool rotary) {
    return !head.is_v && (!SUMS || head.is_q || rotary == (head.index < 0));
}

// Copies a lane's accesses of a head of v, which has V_DIM elements.
__device__ __forceinline__ void copy_value(const Params& p, const Head& head, const Place& place, int lane) {
    for (int dim = lane * VEC; dim < V_DIM; dim += LANES * VEC)
        store_whole(head.output<T>(p, place, dim).first, load_global<T, VEC>(head.input(p, place, dim).first));
}

// Sums a rotary lane's part of all heads of k in fp32, in their order.
__device__ __forceinline__ void sum_heads(const Params& p, const Place& place, int lane, float* sum) {
    #pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i) sum[i] = 0.0f;
    Head head(p, static_cast<int>(p.q_heads) + SUMS);
    #pragma unroll (FULL_WIDTH ? 2 : 4)
    for (int heads = static_cast<int>(p.k_heads); head.index < heads; ++head.index) {
        float x[2 * PAIRS];
        unpack_head(load_head(head.input(p, place, first_dim(lane, INTERLEAVED))), x);
        #pragma unroll
        for (int i = 0; i < 2 * PAIRS; ++i) sum[i] = __fadd_rn(sum[i], x[i]);
    }
}
