// Sums over the blocks of a launch, in the same launch and always in the same order.
//
// Each block has a row of floats. The last block of each FAN_IN neighbours adds their rows to the first of them. The
// last of those blocks adds up what they stored, and stores the result. Counters are zero before and after a launch.

constexpr int FAN_IN = 16;

// Whether this is the last of `blocks` blocks to call this with `counter`. The last one sees the writes of all.
DEVICE bool is_last(unsigned int* counter, unsigned int blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(counter, blocks - 1) == blocks - 1;
    __syncthreads();
    __threadfence();
    return last;
}

// Stores the sum of `count` rows of `width` floats that are `step` floats apart.
template <int N, typename Result>
DEVICE void add_rows(const float* rows, int count, long long step, int width, Result* out) {
    for (int i = threadIdx.x * N; i < width; i += THREADS * N) {
        float sum[N] = {};
        for (int first = 0; first < count; first += FAN_IN) {
            Vec<float, N> part[FAN_IN] = {};
            for (int r = 0; r < FAN_IN; ++r) {
                const float* row = rows + (first + r) * step + i;
                if (first + r < count) part[r].word = __ldcg(reinterpret_cast<const typename Word<4 * N>::type*>(row));
            }
            for (int r = 0; r < FAN_IN; ++r)
                for (int n = 0; n < N; ++n) sum[n] += part[r].item[n];
        }
        Vec<Result, N> total;
        pack(sum, total);
        store(out + i, total);
    }
}

// Sums the rows of all blocks. Every block calls this after the store of its row. N divides `width`. Inline it would
// take registers from the kernel's loop.
template <int N, typename Result>
__device__ __noinline__ void sum_blocks(float* rows, int width, unsigned int* counters, Result* out) {
    const int blocks = gridDim.x * gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x;
    const int groups = (blocks + FAN_IN - 1) / FAN_IN, group = block / FAN_IN;
    const int members = min(FAN_IN, blocks - group * FAN_IN);
    const long long step = 1ll * FAN_IN * width;
    if (!is_last(counters + 1 + group, members)) return;
    add_rows<N>(rows + group * step, members, width, width, rows + group * step);
    if (!is_last(counters, groups)) return;
    add_rows<N>(rows, groups, step, width, out);
}
