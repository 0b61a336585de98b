// The cosine and the sine that turn each pair: loaded from the tables by each lane, or staged in shared memory, by a
// block (`stage`) or by the threads of a token (row.cuh).

#define NOT_A_NUMBER __uint_as_float(0x7fffffffu)

// Returns the value rounded as a store of T rounds it.
DEVICE float rounded(float value) {
    T stored;
    from_float(value, stored);
    return to_float(stored);
}

// Writes cos and sin: (a, b) of an entry, or the cosine and sine of the angle a.
DEVICE void write_turn(const Params& p, float a, float b, float* out) {
    if constexpr (FREQS) {
        float sine, cosine;
        sincosf(a, &sine, &cosine);
        a = __fmul_rn(cosine, p.mscale.value), b = __fmul_rn(sine, p.mscale.value);
    }
    out[0] = ROUNDING == DTYPE ? rounded(a) : a, out[1] = ROUNDING == DTYPE ? rounded(b) : b;
}

// The cosine and sine of each member of a pair; usually they are equal.
struct Turn { Real cos0, sin0, cos1, sin1; };

// ---- loaded: a lane's angles in registers ------------------------------------------------------

struct Angles {
    Real cos[ENTRIES], sin[ENTRIES];

    DEVICE Turn of(int pair) const {
        const int first = FULL_WIDTH && INTERLEAVED ? 2 * pair : pair;
        const int second = !FULL_WIDTH ? pair : INTERLEAVED ? 2 * pair + 1 : PAIRS + pair;
        return {cos[first], sin[first], cos[second], sin[second]};
    }
};

struct TablePair { const Table *cos, *sin; TableStrides cos_stride, sin_stride; };

DEVICE int pair_of(int column) {
    return !FULL_WIDTH ? column : INTERLEAVED ? column / 2 : column % (ROTARY_DIM / 2);
}

// Pairs from an entry of a run to a later one.
DEVICE constexpr int pairs_in(int entries) {
    return FULL_WIDTH && INTERLEAVED ? entries / 2 : entries;
}
// The axes of the pairs of a lane's run with entry i.
DEVICE AxisOfPairs axes_of_run(int lane, int i) { return {pair_of(lane * RUN + i / RUN * RUN_STEP)}; }

// A table that the heads share is much smaller than q and k, and every layer reads it, so it is kept in L2
// (1.036 -> 1.024 x a copy on an H100, out of place). A table with entries for each head is as large as q.
DEVICE void load_table(Real* out, const Table* table, const TableStrides& stride, const Row& row, int head, int lane) {
    if constexpr (!ONE_ROW) table += stride.batch.step(row.batch);
    if constexpr (PER_HEAD) table += stride.head.step(head);
    // The table is the first or the second of two neighbours. An access starts at the first, which is aligned.
    const bool second = TABLE_STEP == 2 && reinterpret_cast<unsigned long long>(table) / sizeof(Table) % 2;
    table += TABLE_VEC == 1 ? stride.dim.step(lane * RUN) : lane * RUN * TABLE_STEP - second;
    const Rows rows(row);
    for (int i = 0; i < ENTRIES; i += TABLE_VEC) {
        const int step = i / RUN * RUN_STEP + i % RUN;
        const Stride pair_row = axes_of_run(lane, i).of(pairs_in(i % RUN), rows.of_axis);
        constexpr int LOADED = TABLE_VEC * TABLE_STEP;
        const Table* address = table + row_offset(pair_row, stride);
        address += TABLE_VEC == 1 ? stride.dim.step(step) : step * TABLE_STEP;
        Real loaded[LOADED];
        unpack(PER_HEAD ? load<Table, LOADED>(address) : load_kept<Table, LOADED>(address), loaded);
        for (int n = 0; n < LOADED; n += TABLE_STEP)
            out[i + n / TABLE_STEP] = second ? loaded[n + TABLE_STEP - 1] : loaded[n];
    }
    if constexpr (ROUNDING == DTYPE && !FREQS) {
        for (int i = 0; i < ENTRIES; ++i) out[i] = rounded(out[i]);
    }
}

// Asks L2 for a lane's entries.
DEVICE void ask_for_table(const Table* table, const TableStrides& stride, const Row& row, int lane) {
#if defined(__CUDA_ARCH__)
    if constexpr (!ONE_ROW) table += stride.batch.step(row.batch);
    const Rows rows(row);
    constexpr int SECTOR = 32 / sizeof(Table) / TABLE_STEP;
    for (int i = 0; i < ENTRIES; i += RUN < SECTOR ? RUN : SECTOR) {
        const int step = lane * RUN + i / RUN * RUN_STEP + i % RUN;
        const Stride pair_row = axes_of_run(lane, i).of(pairs_in(i % RUN), rows.of_axis);
        const Table* address = table + row_offset(pair_row, stride) + stride.dim.step(step);
        asm volatile("prefetch.global.L2 [%0];" :: "l"(address));
    }
#endif
}

// Makes the rotation of pairs that go back its transpose: each sine is negated, and belongs to the partner.
DEVICE void turn_back(Angles& a, const Row& row, int lane) {
    const Rows rows(row);
    Real sin[ENTRIES];
    for (int i = 0; i < ENTRIES; ++i) {
        const bool back = axes_of_run(lane, i).of(pairs_in(i % RUN), rows.back);
        sin[i] = back ? -a.sin[!FULL_WIDTH ? i : INTERLEAVED ? i ^ 1 : (i + PAIRS) % ENTRIES] : a.sin[i];
    }
    for (int i = 0; i < ENTRIES; ++i) a.sin[i] = sin[i];
}

// A token whose row is outside the tables gets NaN, not wrong numbers.
DEVICE Angles load_angles(const TablePair& t, const Row& row, bool outside, int head, int lane) {
    Angles a;
    if (outside) {
        for (int i = 0; i < ENTRIES; ++i) a.cos[i] = a.sin[i] = NOT_A_NUMBER;
        return a;
    }
    load_table(a.cos, t.cos, t.cos_stride, row, head, lane);
    if constexpr (!FREQS) load_table(a.sin, t.sin, t.sin_stride, row, head, lane);
    if constexpr (SHIFTS) turn_back(a, row, lane);
    return a;
}
DEVICE Angles load_angles(const Params& p, const Row& row, int head, int lane) {
    const TablePair t = {p.cos, p.sin, p.cos_stride, p.sin_stride};
    Angles a = load_angles(t, row, outside(p, row), head, lane);
    if constexpr (FREQS) {
        #pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            float both[2];
            write_turn(p, a.cos[i], 0.0f, both);
            a.cos[i] = both[0], a.sin[i] = both[1];
        }
    }
    return a;
}

// Asks L2 for what `load_angles` will load.
DEVICE void ask_for_angles(const TablePair& t, const Row& row, int lane) {
    if (PER_HEAD || lane >= ROTARY_LANES) return;
    ask_for_table(t.cos, t.cos_stride, row, lane);
    if constexpr (!FREQS) ask_for_table(t.sin, t.sin_stride, row, lane);
}
DEVICE void ask_for_angles(const Params& p, const Row& row, int lane) {
    if (row.spare || is_unrotated(row) || outside(p, row)) return;
    ask_for_angles({p.cos, p.sin, p.cos_stride, p.sin_stride}, row, lane);
}

// ---- staged: a token's angles in shared memory -------------------------------------------------

// cos and sin of each pair of a token: the first access of every lane, then the second, so that the lanes of a head
// read different banks. If the members of a pair differ, the second members' lie ROTARY_DIM floats further on.
DEVICE int staged_at(int pair) {
    const int lane = pair / PAIR_RUN % ROTARY_LANES, run = pair / (ROTARY_LANES * PAIR_RUN);
    const int number = 2 * (run * PAIR_RUN + pair % PAIR_RUN);              // of the cosine among the lane's floats
    return (number / STAGE_VEC * ROTARY_LANES + lane) * STAGE_VEC + number % STAGE_VEC;
}

template <bool MEMBERS_DIFFER>
struct Staged {
    const float* first;                                  // the lane's first pair

    DEVICE Turn of(int pair) const {
        const float* access = first + 2 * pair / STAGE_VEC * STAGE_VEC * ROTARY_LANES;
        const int cos = 2 * pair % STAGE_VEC, sin = cos + 1;
        const Vec<float, STAGE_VEC> v = load<float, STAGE_VEC>(access);
        if constexpr (!MEMBERS_DIFFER) return {v.item[cos], v.item[sin], v.item[cos], v.item[sin]};
        const Vec<float, STAGE_VEC> w = load<float, STAGE_VEC>(access + ROTARY_DIM);
        return {v.item[cos], v.item[sin], w.item[cos], w.item[sin]};
    }
};

DEVICE float entry(const Table* row, const TableStrides& stride, int column) {
    row += TABLE_VEC == 1 ? stride.dim.step(column) : column * TABLE_STEP;
    return to_float(load_kept<Table, 1>(row).item[0]);
}

// The entries of a pair of a token: cos and sin of its first member and of its second, or their angles.
struct Entries {
    float cos0, sin0, cos1, sin1;

    // Stages the pair. Returns whether its members differ; in a full-width table they rarely do.
    DEVICE bool store(const Params& p, float* out) const {
        const bool differ =
            __float_as_uint(cos1) != __float_as_uint(cos0) || __float_as_uint(sin1) != __float_as_uint(sin0);
        write_turn(p, cos0, sin0, out);
        if constexpr (FULL_WIDTH) {
            out[ROTARY_DIM] = out[0], out[ROTARY_DIM + 1] = out[1];
            if (differ) write_turn(p, cos1, sin1, out + ROTARY_DIM);
        }
        return differ;
    }
};

DEVICE Entries entries_of(const Params& p, const Row& row, int pair) {
    const Rows rows(row);
    const AxisOfPairs axis = {pair};
    const Stride pair_row = axis.of(0, rows.of_axis);
    const Table* cos = p.cos + p.cos_stride.batch.step(row.batch) + row_offset(pair_row, p.cos_stride);
    const Table* sin = p.sin + p.sin_stride.batch.step(row.batch) + row_offset(pair_row, p.sin_stride);
    const int first_column = FULL_WIDTH && INTERLEAVED ? 2 * pair : pair;
    const int second_column = INTERLEAVED ? 2 * pair + 1 : pair + ROTARY_DIM / 2;
    const bool none = row.spare || is_unrotated(row) || outside(p, row);
    const float a = none ? NOT_A_NUMBER : entry(cos, p.cos_stride, first_column);
    const float b = none || FREQS ? a : entry(sin, p.sin_stride, first_column);
    const float c = FULL_WIDTH && !none ? entry(cos, p.cos_stride, second_column) : a;
    const float d = FULL_WIDTH && !none && !FREQS ? entry(sin, p.sin_stride, second_column) : b;
    return axis.of(0, rows.back) ? Entries{a, -d, c, -b} : Entries{a, b, c, d};
}

// A lane's staged angles. members_differ: those of a pair, somewhere.
struct SharedAngles { const float* first; bool members_differ; };

// A lane's angles: what `find_angles` loads, or `stage` finds, and `turn` takes.
template <bool SHARED> struct Turns { using Of = Angles; };
template <> struct Turns<true> { using Of = SharedAngles; };
using Turned = Turns<STAGED>::Of;

// Without a norm: stages the pairs of every token of the block, each once. `angles` become those of a lane of token
// `slot`. All threads of the block call this.
DEVICE void stage(const Params& p, const Row* rows, float* staged, int slot, int lane, SharedAngles& angles) {
    bool differ = false;
    for (int i = threadIdx.x; i < TOKENS_PER_BLOCK * (ROTARY_DIM / 2); i += THREADS) {
        const int token = i / (ROTARY_DIM / 2), pair = i % (ROTARY_DIM / 2);
        const Row row = rows[token];
        differ |= entries_of(p, row, pair).store(p, staged + token * STAGE_FLOATS + staged_at(pair));
        if constexpr (TOKENS_PER_BLOCK * (ROTARY_DIM / 2) <= THREADS) break;
    }
    angles = {staged + slot * STAGE_FLOATS + lane * STAGE_VEC, __syncthreads_or(differ) != 0};
}
DEVICE void stage(const Params&, const Row*, float*, int, int, Angles&) {}
