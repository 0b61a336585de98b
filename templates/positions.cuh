// Where a token lies, and which row of the tables turns it.

struct Place { int batch, token; };                      // a batch row, and a token in it
struct Span { long long begin, end; };                   // tokens of a sequence, or all tokens

// PACKED: each sequence has its own scales, given or computed.
constexpr bool SEQUENCE_SCALES = PACKED && (HEAD_SCALES || PER_ROW);

// The rows of a token in the tables, one for each axis of position_ids.
struct Row {
    int batch;                                           // SEQUENCE_SCALES: the sequence, or the last one before
    long long row[AXES];
    bool spare;                                          // the token lies after the last sequence
};

__device__ __forceinline__ Place place_of(const Params& p, long long index) {
    const unsigned int token = static_cast<unsigned int>(index);
    if constexpr (PACKED || ONE_ROW) return {0, static_cast<int>(token)};
    const unsigned int inner = static_cast<unsigned int>(BATCH_INNER ? p.batch : p.seqlen);
    const unsigned int outer = token / inner, rest = token - outer * inner;
    const Place place = {static_cast<int>(outer), static_cast<int>(rest)};
    return BATCH_INNER ? Place{place.token, place.batch} : place;
}

// The tokens of a packed sequence on this rank, or the tokens after the last sequence.
__device__ __forceinline__ Span span_of(const Params& p, long long sequence) {
    const int rank = static_cast<int>(p.cp_rank);
    const long long begin = max(0ll, local_offset(p.cu_seqlens[sequence], CP_SIZE, SEQUENCE_CHUNKS, rank));
    if (sequence == p.sequences) return {begin, p.tokens};
    return {begin, min(p.tokens, local_offset(p.cu_seqlens[sequence + 1], CP_SIZE, SEQUENCE_CHUNKS, rank))};
}

// The number of tokens before those of the tables. HAS: PREFIXED; a template, because other kernels have no such
// argument.
template <bool HAS, typename Arguments>
__device__ __forceinline__ long long unrotated_of(const Arguments& p) {
    if constexpr (HAS) return p.unrotated;
    return 0;
}

// Whether a token is not rotated, because it comes before those of the tables.
__device__ __forceinline__ bool is_unrotated(const Row& row) { return PREFIXED && row.row[0] < 0; }

// The row of token `index` at `place`. PACKED: the token is in `sequence`.
__device__ __forceinline__ Row row_of(const Params& p, const Place& place, long long index, long long sequence) {
    if constexpr (POSITION_IDS) {
        Row row = {place.batch, {}, false};
        const PositionIds* ids = p.position_ids + p.ids_stride.token.step(place.token);
        if constexpr (!ONE_ROW) ids += p.ids_stride.batch.step(place.batch);
        #pragma unroll
        for (int axis = 0; axis < AXES; ++axis) row.row[axis] = ids[p.ids_stride.axis.step(axis)];
        return row;
    }
    const int rank = static_cast<int>(p.cp_rank);
    unsigned long long row;  // wild first positions may wrap
    if constexpr (PACKED) {
        if (sequence == p.sequences)
            return {SEQUENCE_SCALES && sequence > 0 ? static_cast<int>(sequence) - 1 : 0, {}, true};
        const CuSeqlens first = p.cu_seqlens[sequence], end = p.cu_seqlens[sequence + 1];
        row = position_of(index - span_of(p, sequence).begin, first, end, CP_SIZE, SEQUENCE_CHUNKS, rank);
    } else {
        row = position_in_equal_chunks(place.token, p.seqlen, CP_SIZE, rank);
    }
    if constexpr (START_POSITIONS) row += p.start_positions[PACKED ? sequence : place.batch];
    if constexpr (PACKED_TABLE) row += p.cu_seqlens[sequence];
    if constexpr (PREFIXED) row -= unrotated_of<PREFIXED>(p);
    return {SEQUENCE_SCALES ? static_cast<int>(sequence) : place.batch, {static_cast<long long>(row)}, false};
}

// The same, where each thread searches for the sequence of its token.
__device__ __forceinline__ Row row_of(const Params& p, const Place& place, long long index) {
    long long sequence = 0;
    if constexpr (PACKED) {
        const int rank = static_cast<int>(p.cp_rank);
        sequence = find_between(p.cu_seqlens, 0, p.sequences, offset_past(index, CP_SIZE, SEQUENCE_CHUNKS, rank));
    }
    return row_of(p, place, index, sequence);
}

// The rows of a block's tokens, first to last. PACKED: the block's warps search for the sequences of the first and the
// last token. Each thread searches for its token's sequence between them.
__device__ __forceinline__ void find_rows(
    const Params& p, long long first, long long last, long long sequence, Row* rows, long long* ends
) {
    constexpr bool SEARCHES = PACKED && TOKEN_LINEAR;
    const int rank = static_cast<int>(p.cp_rank);
    if constexpr (SEARCHES) {
        for (int end = threadIdx.x / 32; end < (TOKENS_PER_BLOCK > 1 ? 2 : 1); end += THREADS / 32) {
            sequence = find_sequence(
                p.cu_seqlens, p.sequences, offset_past(end ? last : first, CP_SIZE, SEQUENCE_CHUNKS, rank)
            );
            if (threadIdx.x % 32 == 0) ends[end] = sequence;
        }
        if constexpr (TOKENS_PER_BLOCK > 1) __syncthreads();
    }
    if (threadIdx.x < TOKENS_PER_BLOCK) {
        const long long index = min(first + threadIdx.x, last);
        if constexpr (SEARCHES && TOKENS_PER_BLOCK > 1)
            sequence = find_between(
                p.cu_seqlens, ends[0], ends[1], offset_past(index, CP_SIZE, SEQUENCE_CHUNKS, rank)
            );
        rows[threadIdx.x] = row_of(p, place_of(p, index), index, sequence);
    }
    __syncthreads();
}

// The row of the tables for a token's position. SHIFTS: its size.
__device__ __forceinline__ unsigned long long size_of(long long row) {
    const unsigned long long size = static_cast<unsigned long long>(row);
    return SHIFTS && row < 0 ? 0 - size : size;
}

// Whether a row of a token is outside the tables.
__device__ __forceinline__ bool outside(const Params& p, const Row& row) {
    bool found = false;
    #pragma unroll
    for (int axis = 0; axis < AXES; ++axis)
        found |= size_of(row.row[axis]) >= static_cast<unsigned long long>(p.table_rows);
    return GUARDED && found;
}

// The row for a pair: the row of its axis, which must be inside the tables.
__device__ __forceinline__ Stride row_of_pair(const Row& row, int pair) {
    Stride found = static_cast<Stride>(size_of(row.row[0]));
    #pragma unroll
    for (int axis = 1; axis < AXES; ++axis) {
        const int begin = mrope_section_end(axis - 1), size = mrope_section_end(axis) - begin;
        // Loads every axis' row: an index that is not constant would put the rows in local memory.
        const Stride other = static_cast<Stride>(row.row[axis]);
        const bool is_its = MROPE_INTERLEAVED ? pair % AXES == axis && pair < AXES * size : pair >= begin;
        found = is_its ? other : found;
    }
    return found;
}

// MROPE_INTERLEAVED: the rows for neighbouring pairs from `first` on. Pair first + i has row i % AXES, or from that
// row's end on the row of the first axis. No pair needs a division.
struct Alternating {
    Stride first_axis, row[AXES];
    int first, end[AXES];

    __device__ __forceinline__ Alternating(const Row& rows, int first)
        : first_axis(static_cast<Stride>(rows.row[0])), first(first) {
        const int axis = first % AXES;                   // of the first pair
        #pragma unroll
        for (int i = 0; i < AXES; ++i) {
            row[i] = first_axis, end[i] = ROTARY_DIM;
            #pragma unroll
            for (int other = 1; other < AXES; ++other) {
                if (axis != (other - i + AXES) % AXES) continue;
                row[i] = static_cast<Stride>(rows.row[other]);
                end[i] = AXES * (mrope_section_end(other) - mrope_section_end(other - 1));
            }
        }
    }
    __device__ __forceinline__ Stride of(int i) const {
        return first + i < end[i % AXES] ? row[i % AXES] : first_axis;
    }
};

__device__ __forceinline__ long long row_offset(Stride row, const TableStrides& stride) {
    return static_cast<unsigned long long>(row) * stride.row.stride;
}
