// The rows of a norm, the angles of a lane, and threads that exchange elements.
//
// A row is the elements of one mean: a head, or with ACROSS_HEADS all heads of q or of k of a token. A head has TEAM
// threads: its LANES and some that idle. A thread has a part of STEPS heads, STRIDE apart. With ACROSS_HEADS they are
// heads of its row, and the row's ROW_THREADS take HEADS_PER_BLOCK heads at a time. Otherwise they are neighbouring
// heads, which share weights and angles.

constexpr int TENSORS = K_HEADS ? 2 : 1;                 // ACROSS_HEADS: rows of a token
constexpr int ROW_HEADS = Q_HEADS > K_HEADS ? Q_HEADS : K_HEADS;
constexpr int STEPS = ACROSS_HEADS ? (ROW_HEADS + HEADS_PER_BLOCK - 1) / HEADS_PER_BLOCK : HEADS_PER_THREAD;
constexpr int STRIDE = ACROSS_HEADS ? HEADS_PER_BLOCK : 1;
constexpr int ROWS = ACROSS_HEADS ? 1 : STEPS;           // rows that a thread has a part of at a time
constexpr bool STORES_T = sizeof(QOut) == sizeof(T) || sizeof(KvOut) == sizeof(T) || ROTATE_K
    || (PE_CACHE && !PE_SCALED);
constexpr bool LAYER = NORM_KIND == LAYER_NORM;
constexpr bool NORM_BOTH = NORM_Q && NORM_K;
constexpr bool WEIGHS_HEADS = ACROSS_HEADS || GIVEN_MEANS || LATENT_NORM;   // each head has its own weights
constexpr int ROW_DIM = NORM_NOPE ? ROTARY_OFFSET : HEAD_DIM;               // elements of a head in a row
constexpr int WEIGHT_SETS = WEIGHS_HEADS ? STEPS : 1;    // sets of weights of a thread
constexpr int ROW_THREADS = ACROSS_HEADS ? TEAM * HEADS_PER_BLOCK : TEAM;
constexpr int ROW_WARPS = (ROW_THREADS + 31) / 32;
static_assert(ROW_THREADS <= 32 || (ROW_THREADS % 32 == 0 && THREADS % ROW_THREADS == 0), "a row is whole warps");

// Whether a head of q or k is not normalised, beside one that is.
DEVICE bool is_plain(const Head& head) {
    return !NORM_BOTH && !head.is_v && !(head.is_q ? NORM_Q : NORM_K);
}

// STAGED: the threads of a token find its angles together, a pair each. Those of the block's next token are on
// their way while it works on this one. Two places in shared memory take turns, so there is one barrier for a token.
struct Stage {
    static constexpr int FLOATS = STAGED ? TOKENS_PER_BLOCK * STAGE_FLOATS : 1;          // of a place

    float (*places)[FLOATS];
    int offset, pair;                                    // of the thread's token in a place; the pair that it finds
    bool second = false, members_differ = false;         // the place of the next token; those of its pair differ
    Entries next = {};

    // A thread of token `slot` of the block.
    DEVICE Stage(float (*places)[FLOATS], int slot)
        : places(places), offset(min(slot, TOKENS_PER_BLOCK - 1) * STAGE_FLOATS),
          pair(slot < TOKENS_PER_BLOCK ? threadIdx.x % (HEADS_PER_BLOCK * TEAM) : ROTARY_DIM) {}

    // Begins to load the next token's.
    DEVICE void load(const Params& p, const Row& row) {
        if (STAGED && pair < ROTARY_DIM / 2) next = entries_of(p, row, pair);
    }
    DEVICE void store(const Params& p) {
        if (STAGED && pair < ROTARY_DIM / 2)
            members_differ = next.store(p, places[second] + offset + staged_at(pair));
    }
    // Those that were stored last become this token's. All threads of the block call this.
    DEVICE void take(int lane, SharedAngles& angles) {
        const bool differ = __syncthreads_or(members_differ);
        angles = {places[second] + offset + min(lane, ROTARY_LANES - 1) * STAGE_VEC, differ};
        second = !second;
    }
    DEVICE void take(int, Angles&) {}
};

// ---- threads that exchange elements ------------------------------------------------------------

DEVICE void sync_team() {
    if constexpr (TEAM <= 32) __syncwarp();
    else __syncthreads();
}

// Room for a team's head.
DEVICE float* shared_head() {
    __shared__ float heads[THREADS / TEAM][HEAD_DIM];
    return heads[threadIdx.x / TEAM];
}

// ---- the sum over a row ------------------------------------------------------------------------

// Sums COUNT numbers, each over the threads of a row. Every thread of the row gets the sums.
template <int COUNT>
DEVICE void row_sum(float (&sum)[COUNT]) {
    for (int step = (ROW_THREADS < 32 ? ROW_THREADS : 32) / 2; step > 0; step /= 2)
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

DEVICE float elements_of_row(const Head& head) {
    return ACROSS_HEADS ? HEAD_DIM * static_cast<float>(head.tensor ? K_HEADS : Q_HEADS) : ROW_DIM;
}

// Adds a lane's part of a head to a row's sum.
DEVICE void add_up(const float* x, float& sum) {
    for (int i = 0; i < ELEMENTS; ++i) sum = __fadd_rn(sum, x[i]);
}

// Subtracts the mean of a row from a lane's part of a head, which has `count` elements. The others are zeros.
DEVICE void subtract(float mean, int count, float* x) {
    for (int i = 0; i < ELEMENTS; ++i) x[i] = i < count ? __fadd_rn(x[i], -mean) : 0.0f;
}

// 1 / sqrt(mean + eps) of a row's sum of squares, as torch's rms_norm or its mean computes it. For a power of two
// both are the same.
DEVICE float scale_of_row(const Params& p, float sum, const Head& head) {
    constexpr bool exact = !ACROSS_HEADS && (ROW_DIM & (ROW_DIM - 1)) == 0;
    const float count = elements_of_row(head), part = ACROSS_HEADS ? __frcp_rn(count) : 1.0f / ROW_DIM;
    const float mean = exact || NORM_ROUNDING == TWICE ? __fmul_rn(sum, part) : __fdiv_rn(sum, count);
    return rsqrtf(__fadd_rn(mean, p.eps.value));
}
