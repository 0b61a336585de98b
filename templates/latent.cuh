// Latent attention: what is not one head of q, k or v in, and one out.

// Whether a lane stores its part of a head as of q and k elsewhere. A head of v is copied by all lanes. SUMS: the
// rotary lanes store the sum over k's heads, and the others store the rest of each head.
DEVICE bool stores(const Head& head, bool rotary) {
    return !head.is_v && (!SUMS || head.is_q || rotary == (head.index < 0));
}

// Loads a lane's first accesses of a head of v, which has V_DIM elements.
DEVICE Chunks load_value(const Params& p, const Head& head, const Place& place, int lane) {
    Chunks chunks = {};
    for (int n = 0; n < ACCESSES; ++n) {
        const int dim = (n * LANES + lane) * VEC;
        if (dim < V_DIM) chunks.x[n] = load_global<T, VEC>(head.input(p, place, dim).first);
    }
    return chunks;
}

// Stores them, and copies the lane's other accesses. CONVERT_V: divided by v's scale.
DEVICE void copy_value(
    const Params& p, const Head& head, const Place& place, const Row& row, int lane, const Chunks& chunks
) {
    const float factor = CONVERT_V ? __frcp_rn(scale_of(p, head, row)) : 1.0f;
    for (int n = 0; n * LANES * VEC < V_DIM; ++n) {
        const int dim = (n * LANES + lane) * VEC;
        if (dim >= V_DIM) return;
        const bool loaded = n < ACCESSES;
        const Vec<T, VEC> x = loaded ? chunks.x[n % ACCESSES] : load_global<T, VEC>(head.input(p, place, dim).first);
        if constexpr (CONVERT_V) {
            float y[VEC];
            unpack(x, y);
            put(head.output<KvOut>(p, place, dim).first, x, y, factor);
        } else {
            store_whole(head.output<T>(p, place, dim).first, x);
        }
    }
}

// Sums the rotated elements of a token over all heads of k, in fp32 and in their order. All threads of the block load
// a part of several heads at once.
DEVICE void sum_heads(const Params& p, const Place& place, float* sums) {
    constexpr int EACH = ROTARY_DIM / VEC;               // accesses of a head
    constexpr int AT_ONCE = 16384 / static_cast<int>(ROTARY_DIM * sizeof(T));
    __shared__ Vec<T, VEC> parts[AT_ONCE * EACH];
    Head head(p, static_cast<int>(p.q_heads) + SUMS);
    for (int heads = static_cast<int>(p.k_heads), done = 0; done < max(heads, 1); done += AT_ONCE) {
        const int count = min(AT_ONCE, heads - done);
        __syncthreads();                                 // the parts before these have been added
        #pragma unroll 4
        for (int i = threadIdx.x; i < count * EACH; i += THREADS) {
            head.index = done + i / EACH;
            parts[i] = load_global<T, VEC>(head.input(p, place, ROTARY_OFFSET + i % EACH * VEC).first);
        }
        __syncthreads();
        for (int element = threadIdx.x; element < ROTARY_DIM; element += THREADS) {
            float sum = done ? sums[element] : 0.0f;
            #pragma unroll 8
            for (int i = 0; i < count; ++i)
                sum = __fadd_rn(sum, to_float(parts[i * EACH + element / VEC].item[element % VEC]));
            sums[element] = sum;
        }
    }
    __syncthreads();
}
