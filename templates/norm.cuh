// Shared by QK-norm + rope and its gradient: two streams of tokens, the weights, and the sum over a row.
//
// A row is the elements of one mean: a head, or with ACROSS_HEADS all heads of q or of k of a token. A head has TEAM
// threads: its LANES and some that idle. A thread has a part of STEPS heads, STRIDE apart. With ACROSS_HEADS they are
// heads of its row, and the row's ROW_THREADS take HEADS_PER_BLOCK heads at a time. Otherwise they are neighbouring
// heads, which share weights and angles.

constexpr int ELEMENTS = ACCESSES * VEC;                 // elements that a lane has of a head
constexpr int TENSORS = K_HEADS ? 2 : 1;                 // ACROSS_HEADS: rows of a token
constexpr int ROW_HEADS = Q_HEADS > K_HEADS ? Q_HEADS : K_HEADS;
constexpr int STEPS = ACROSS_HEADS ? (ROW_HEADS + HEADS_PER_BLOCK - 1) / HEADS_PER_BLOCK : HEADS_PER_THREAD;
constexpr int STRIDE = ACROSS_HEADS ? HEADS_PER_BLOCK : 1;
constexpr int ROWS = ACROSS_HEADS ? 1 : STEPS;           // rows that a thread has a part of at a time
constexpr bool LAYER = NORM_KIND == LAYER_NORM;
constexpr bool NORM_BOTH = NORM_Q && NORM_K;
constexpr bool WEIGHS_HEADS = ACROSS_HEADS || GIVEN_MEANS || LATENT_NORM;   // each head has its own weights
constexpr int WEIGHT_SETS = WEIGHS_HEADS ? STEPS : 1;    // sets of weights of a thread
constexpr int ROW_THREADS = ACROSS_HEADS ? TEAM * HEADS_PER_BLOCK : TEAM;
constexpr int ROW_WARPS = (ROW_THREADS + 31) / 32;
static_assert(!V_NORM || COPY_V, "refused by the host");
static_assert(!GIVEN_MEANS || !(V_NORM || LAYER || TWO_STREAMS), "refused by the host");
static_assert(!GIVEN_MEANS || NORM_BOTH, "refused by the host");
static_assert(!LATENT_NORM || (CACHE && COPY_V && !LAYER), "refused by the host");
static_assert(!ACROSS_HEADS || (TOKEN_LINEAR && !COPY_V && !HADAMARD && !DYNAMIC), "refused by the host");
static_assert(!DYNAMIC || (CONVERTS && (!IN_PLACE || BLOCK_CACHE)), "refused by the host");
static_assert(ROW_THREADS <= 32 || (ROW_THREADS % 32 == 0 && THREADS % ROW_THREADS == 0), "a row is whole warps");

// Whether a head of q or k is not normalised, beside one that is.
__device__ __forceinline__ bool is_plain(const Head& head) {
    return !NORM_BOTH && !head.is_v && !(head.is_q ? NORM_Q : NORM_K);
}

// ---- two streams -------------------------------------------------------------------------------

__device__ __forceinline__ bool in_second_stream(const Params& p, const Place& place) {
    return TWO_STREAMS && place.token >= static_cast<int>(p.split);
}

__device__ __forceinline__ Lane<const T> lane_of(
    const T* base, const Strides& stride, const Place& place, const Head& head, int dim
) {
    base += stride.token.step(place.token) + head.step(stride.group, stride.head);
    base += ONE_ROW ? 0 : stride.batch.step(place.batch);
    return {base + (VEC == 1 ? stride.dim.step(dim) : dim), stride.dim};
}

// A lane's part of a head in the tensor of its stream, from which it is read.
__device__ __forceinline__ Lane<const T> source_of(const Params& p, const Head& head, const Place& place, int dim) {
    if constexpr (!TWO_STREAMS) return head.input(p, place, dim);
    const bool second = in_second_stream(p, place);
    const int number = head.tensor + (second ? 3 : 0);
    const Place own = {place.batch, place.token - (second ? static_cast<int>(p.split) : 0)};
    return lane_of(p.source[number], p.source_stride[number], own, head, dim);
}

__device__ __forceinline__ TablePair second_tables(const Params& p) {
    return {p.second_table[0], p.second_table[1], p.second_table_stride[0], p.second_table_stride[1]};
}

__device__ __forceinline__ Angles angles_of(const Params& p, const Place& place, Row row, int head, int lane) {
    if (!TWO_TABLES || !in_second_stream(p, place)) return load_angles(p, row, head, lane);
    row.row[0] -= p.split;
    return load_angles(second_tables(p), row, false, head, lane);
}

// A lane's staged angles. members_differ: those of a pair, somewhere.
struct SharedAngles { const float* first; bool members_differ; };

template <bool BACK = INVERSE>
__device__ __forceinline__ void turn(const float* x, float* y, const SharedAngles& angles) {
    if (FULL_WIDTH && angles.members_differ) turn<BACK>(x, y, Staged<FULL_WIDTH>{angles.first});
    else turn<BACK>(x, y, Staged<false>{angles.first});
}

// A lane's angles: loaded by itself, or staged.
template <bool SHARED> struct Turns { using Of = Angles; };
template <> struct Turns<true> { using Of = SharedAngles; };
using Turned = Turns<SHARES_ANGLES>::Of;

// Finds the angles of a head, or of all heads, for a lane that `turns`.
__device__ __forceinline__ void find_angles(
    const Params& p, const Place& place, const Row& row, int head, int lane, bool turns, Angles& angles
) {
    if (turns) angles = angles_of(p, place, row, head, lane);
}
__device__ __forceinline__ void find_angles(
    const Params&, const Place&, const Row&, int, int, bool, SharedAngles&
) {}                                                     // staged already

// SHARES_ANGLES: the threads of a token find its angles together, a pair each. Those of the block's next token are on
// their way while it works on this one. Two places in shared memory take turns, so there is one barrier for a token.
struct Stage {
    static constexpr int FLOATS = SHARES_ANGLES ? TOKENS_PER_BLOCK * STAGE_FLOATS : 1;          // of a place

    float (*places)[FLOATS];
    int offset, pair;                                    // of the thread's token in a place; the pair that it finds
    bool second = false, members_differ = false;         // the place of the next token; those of its pair differ
    Entries next = {};

    // A thread of token `slot` of the block.
    __device__ __forceinline__ Stage(float (*places)[FLOATS], int slot)
        : places(places), offset(min(slot, TOKENS_PER_BLOCK - 1) * STAGE_FLOATS),
          pair(slot < TOKENS_PER_BLOCK ? threadIdx.x % (HEADS_PER_BLOCK * TEAM) : ROTARY_DIM) {}

    // Begins to load the next token's.
    __device__ __forceinline__ void load(const Params& p, const Row& row) {
        if (SHARES_ANGLES && pair < ROTARY_DIM / 2) next = entries_of(p, row, pair);
    }
    __device__ __forceinline__ void store(const Params& p) {
        if (SHARES_ANGLES && pair < ROTARY_DIM / 2)
            members_differ = next.store(p, places[second] + offset + 2 * pair);
    }
    // Those that were stored last become this token's. All threads of the block call this.
    __device__ __forceinline__ void take(int lane, SharedAngles& angles) {
        const bool differ = __syncthreads_or(members_differ);
        angles = {places[second] + offset + 2 * min(lane, ROTARY_LANES - 1) * PAIR_RUN, differ};
        second = !second;
    }
    __device__ __forceinline__ void take(int, Angles&) {}
};

// Asks L2 for what `angles_of` will load.
__device__ __forceinline__ void ask_for_angles(const Params& p, const Place& place, Row row, int lane) {
    if (!TWO_TABLES || !in_second_stream(p, place)) return ask_for_angles(p, row, lane);
    row.row[0] -= p.split;
    ask_for_angles(second_tables(p), row, lane);
}

// ---- threads that exchange elements ------------------------------------------------------------

__device__ __forceinline__ void sync_team() {
    if constexpr (TEAM <= 32) __syncwarp();
    else __syncthreads();
}

// Room for a team's head.
__device__ __forceinline__ float* shared_head() {
    __shared__ float heads[THREADS / TEAM][HEAD_DIM];
    return heads[threadIdx.x / TEAM];
}

// REORDERS: makes the rotated elements of a head interleaved pairs, if TO_PAIRS, or halves. The norm before it has the
// lanes and the sums of a call that keeps its pairs. x: the lane's part, from `dim` on; has: it is of q or k. All
// threads of a team call this.
template <bool TO_PAIRS>
__device__ __forceinline__ void reorder(float (&x)[ELEMENTS], int dim, bool rotary, bool has) {
    constexpr int HALF = ROTARY_DIM / 2;
    float* head = shared_head();
    const auto place_of = [&](int i) { return dim - ROTARY_OFFSET + dims_to(i / VEC, INTERLEAVED) + i % VEC; };
    #pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        const int from = place_of(i), to = TO_PAIRS ? from % HALF * 2 + from / HALF : from % 2 * HALF + from / 2;
        if (has && rotary) head[to] = x[i];
    }
    sync_team();
    #pragma unroll
    for (int i = 0; i < ELEMENTS; ++i)
        if (has && rotary) x[i] = head[place_of(i)];
    sync_team();                                         // the next head may be written
}

// ---- the weights -------------------------------------------------------------------------------

// The weights of a head's tensor. HAS: LATENT_NORM; a template, as in `factor_of`.
template <bool HAS, typename Arguments>
__device__ __forceinline__ const Weight* weights_of(const Arguments& p, const Head& head, int number) {
    if constexpr (HAS) return static_cast<const Weight*>(p.v_weight);
    return p.weight[number];
}

// The weights and biases of a lane's part of a head, in their stored type.
struct Factors {
    Vec<Weight, WEIGHT_VEC> x[WEIGHTED ? ELEMENTS / WEIGHT_VEC : 1] = {};
    Vec<Weight, WEIGHT_VEC> bias[BIASED ? ELEMENTS / WEIGHT_VEC : 1] = {};

    __device__ __forceinline__ void load(
        const Params& p, const Head& head, bool second, int dim, bool rotary, bool with_bias = BIASED
    ) {
        if (!WEIGHTED || head.is_v != LATENT_NORM || (!NORM_BOTH && is_plain(head))) return;
        const int number = head.tensor + (second ? 2 : 0);
        dim += WEIGHS_HEADS ? head.index / (GATED && head.is_q ? Q_PER_GROUP : 1) * HEAD_DIM : 0;
        load_from(weights_of<LATENT_NORM>(p, head, number) + dim, x, rotary);
        if (with_bias) load_from(p.bias[number] + dim, bias, rotary);
    }

    template <int COUNT>
    __device__ __forceinline__ void load_from(const Weight* from, Vec<Weight, WEIGHT_VEC> (&to)[COUNT], bool rotary) {
        #pragma unroll
        for (int i = 0; i < ELEMENTS; i += WEIGHT_VEC) {
            if (!rotary && i / VEC >= COPY_ACCESSES) continue;
            const int dims = dims_to(i / VEC, INTERLEAVED, rotary) + i % VEC;
            to[i / WEIGHT_VEC] = load_kept<Weight, WEIGHT_VEC>(from + dims);
        }
    }

    __device__ __forceinline__ void values(float* out) const {
        #pragma unroll
        for (int i = 0; i < ELEMENTS; i += WEIGHT_VEC) unpack(x[i / WEIGHT_VEC], out + i);
        if constexpr (ZERO_CENTERED) {
            #pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) out[i] = __fadd_rn(out[i], 1.0f);
        }
    }

    // Multiplies x by the weights, and adds the biases.
    __device__ __forceinline__ void apply(float* x) const {
        if constexpr (!WEIGHTED) return;
        float factor[ELEMENTS], shift[ELEMENTS];
        values(factor);
        if constexpr (BIASED) {
            #pragma unroll
            for (int i = 0; i < ELEMENTS; i += WEIGHT_VEC) unpack(bias[i / WEIGHT_VEC], shift + i);
        }
        #pragma unroll
        for (int i = 0; i < ELEMENTS; ++i)
            x[i] = BIASED ? __fmaf_rn(x[i], factor[i], shift[i]) : __fmul_rn(x[i], factor[i]);
    }
};

// ---- the sum over a row ------------------------------------------------------------------------

// Sums COUNT numbers, each over the threads of a row. Every thread of the row gets the sums.
template <int COUNT>
__device__ __forceinline__ void row_sum(float (&sum)[COUNT]) {
    #pragma unroll
    for (int step = (ROW_THREADS < 32 ? ROW_THREADS : 32) / 2; step > 0; step /= 2)
        #pragma unroll
        for (int n = 0; n < COUNT; ++n) sum[n] = __fadd_rn(sum[n], __shfl_xor_sync(~0u, sum[n], step));
    if constexpr (ROW_THREADS > 32) {
        __shared__ float of_warps[COUNT][THREADS / 32];
        const int warp = threadIdx.x / 32, first = warp / ROW_WARPS * ROW_WARPS;
        __syncthreads();                                 // the sum before this one has been read
        for (int n = 0; n < COUNT; ++n)
            if (threadIdx.x % 32 == 0) of_warps[n][warp] = sum[n];
        __syncthreads();
        for (int n = 0; n < COUNT; ++n) {
            sum[n] = 0.0f;
            for (int w = 0; w < ROW_WARPS; ++w) sum[n] = __fadd_rn(sum[n], of_warps[n][first + w]);
        }
    }
}

__device__ __forceinline__ float elements_of_row(const Head& head) {
    return ACROSS_HEADS ? HEAD_DIM * static_cast<float>(head.tensor ? K_HEADS : Q_HEADS) : HEAD_DIM;
}

// Adds a lane's part of a head to a row's sum.
__device__ __forceinline__ void add_up(const float* x, float& sum) {
    #pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) sum = __fadd_rn(sum, x[i]);
}

// Subtracts the mean of a row from a lane's part of a head, which has `count` elements. The others are zeros.
__device__ __forceinline__ void subtract(float mean, int count, float* x) {
    #pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) x[i] = i < count ? __fadd_rn(x[i], -mean) : 0.0f;
}

// 1 / sqrt(mean + eps) of the given mean of a row's squares, with the head's tensor. HAS: GIVEN_MEANS; a template, as
// in `factor_of`.
template <bool HAS, typename Arguments>
__device__ __forceinline__ float given_scale(const Arguments& p, const Place& place, const Head& head) {
    if constexpr (HAS) {
        const Strides& stride = p.mean_stride[head.tensor ? 1 : 0];              // a gate is beside heads of q
        const float* mean = p.mean_square[head.tensor ? 1 : 0] + stride.token.step(place.token);
        if constexpr (!ONE_ROW) mean += stride.batch.step(place.batch);
        return rsqrtf(__fadd_rn(*mean, p.scalars.eps));
    }
    return 0.0f;
}

// 1 / sqrt(mean + eps) of a row's sum of squares, as torch's rms_norm or its mean computes it. For a power of two
// both are the same.
__device__ __forceinline__ float scale_of_row(const Params& p, float sum, const Head& head) {
    constexpr bool exact = !ACROSS_HEADS && (HEAD_DIM & (HEAD_DIM - 1)) == 0;
    const float count = elements_of_row(head), part = ACROSS_HEADS ? __frcp_rn(count) : 1.0f / HEAD_DIM;
    const float mean = exact || NORM_ROUNDING == TWICE ? __fmul_rn(sum, part) : __fdiv_rn(sum, count);
    return rsqrtf(__fadd_rn(mean, p.scalars.eps));
}
