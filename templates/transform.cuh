// transform: the Hadamard matrix.

constexpr int USED = HEAD_DIM < WIDTH ? HEAD_DIM : WIDTH;         // those of them that have elements
constexpr int SPAN = HEAD_DIM / USED;                    // neighbouring elements of each of them
// The chunks of the lanes are in order: element i of a chunk, then the lane's number in its part, then the chunk, then
// the number of the part that is as large as the rotated one.
constexpr bool IN_ORDER = TEAM <= 32 && TEAM == LANES && (REST == 0 || ALIKE);

// Sums and differences of elements 1, 2, 4, ... apart.
template <int COUNT>
DEVICE void add_neighbours(float* x) {
    for (int step = 1; step < COUNT; step *= 2)
        for (int i = 0; i < COUNT; ++i)
            if (!(i & step)) {
                const float a = x[i], b = x[i + step];
                x[i] = __fadd_rn(a, b), x[i + step] = __fadd_rn(a, -b);
            }
}

// The same for the elements of threads `begin`, 2 begin, ... apart, before `end`.
template <int COUNT>
DEVICE void add_threads(float* x, int begin, int end) {
    for (int step = begin; step < end; step *= 2) {
        const float sign = threadIdx.x & step ? -1.0f : 1.0f;
        for (int i = 0; i < COUNT; ++i) x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(~0u, x[i], step));
    }
}

// 1 / sqrt(n) for a power of two.
__device__ constexpr float inverse_root(int n) {
    return n == 1 ? 1.0f : n == 2 ? 0.70710678f : 0.5f * inverse_root(n / 4);
}

// Multiplies a head by the orthogonal Hadamard matrix in Sylvester's order, from the lowest bit of an element's number
// to the highest.
struct Transform {
    static constexpr bool WHOLE = true;

    DEVICE void apply(const Own& own, Elements& x, Chunks& chunks) const {
        const Part& part = own.part;
        const bool wanted = !COPY_V || !own.head.is_v, has = own.here && wanted;
        Elements y;
        copy(x, y);
        if constexpr (IN_ORDER) {
            for (int c = 0; c < CHUNKS; ++c) add_neighbours<CHUNK>(y + c * CHUNK);
            add_threads<ELEMENTS>(y, 1, ROTARY_LANES);
            for (int i = 0; i < CHUNK && CHUNKS == 2; ++i) {
                const float a = y[i], b = y[(i + CHUNK) % ELEMENTS];
                y[i] = __fadd_rn(a, b), y[(i + CHUNK) % ELEMENTS] = __fadd_rn(a, -b);
            }
            add_threads<ELEMENTS>(y, ROTARY_LANES, TEAM);
        } else {
            const int thread = threadIdx.x % TEAM;
            float* head = shared_head();
            for (int i = 0; i < ELEMENTS; ++i)
                if (has && i < part.count) head[part.dim_of(i)] = y[i];
            sync_team();
            if (thread < WIDTH) {
                const bool uses = USED == WIDTH || thread < USED;
                float some[SPAN] = {};
                for (int i = 0; i < SPAN; ++i)
                    if (uses) some[i] = head[thread * SPAN + i];
                add_neighbours<SPAN>(some);
                add_threads<SPAN>(some, 1, USED);
                for (int i = 0; i < SPAN; ++i)
                    if (uses) head[thread * SPAN + i] = some[i];
            }
            sync_team();
            for (int i = 0; i < ELEMENTS; ++i)
                if (has && i < part.count) y[i] = head[part.dim_of(i)];
            sync_team();                                 // the next head may be written
        }
        for (int i = 0; i < ELEMENTS; ++i)
            if (wanted) x[i] = __fmul_rn(y[i], inverse_root(HEAD_DIM));
        if constexpr (ROUNDS_FIRST) round_all(x);
        if (STORES_T && !own.head.is_v && !(ADDED_BIAS && part.stays)) pack_head(x, chunks);
    }
};
