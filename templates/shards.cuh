// Where the tokens of a packed batch lie among the ranks' shards; the rule is in sequences.cuh.
//
// A sequence is cut into `of` chunks: 2 cp_size ("dual chunk", see there) or cp_size, of which a rank has one
// ("contiguous"). The tokens after the last sequence are one more. There are fewer than 2^31 of them.

// Of the first `offset` tokens of the batch, those that a rank has.
__device__ __forceinline__ int rows_before(int offset, int cp_size, int of, int rank) {
    if (of == cp_size) return static_cast<int>(chunk_count(offset, rank, of));
    return static_cast<int>(local_offset(offset, cp_size, rank));
}

// The least offset with more than `row` of them.
__device__ __forceinline__ long long offset_with(int row, int cp_size, int of, int rank) {
    if (of == cp_size) return static_cast<long long>(row) * of + rank + 1;
    return offset_past(row, cp_size, rank);
}

__device__ __forceinline__ int rank_of(int chunk, int cp_size, int of) {
    return of == cp_size || chunk < cp_size ? chunk : of - 1 - chunk;
}

// How many of a rank's chunks come before `chunk` in a sequence: none or one.
__device__ __forceinline__ int part_of(int chunk, int cp_size, int of) { return of > cp_size && chunk >= cp_size; }

struct Sequence { int first, end; };                      // its tokens in the batch

__device__ __forceinline__ int chunk_start(Sequence s, int chunk, int of) {
    return static_cast<int>(chunk_before(s.end, chunk, of) - chunk_before(s.first, chunk, of));
}
__device__ __forceinline__ int chunk_size(Sequence s, int chunk, int of) {
    return static_cast<int>(chunk_count(s.end, chunk, of) - chunk_count(s.first, chunk, of));
}

// The chunk that a position is in. The first `low` chunks have `size` tokens, as do those from `high` on; the ones
// between have one more, or one less.
__device__ __forceinline__ int chunk_at(Sequence s, int position, int of) {
    const int first = s.first % of, end = s.end % of;
    const int low = min(first, end), high = max(first, end);
    const int size = s.end / of - s.first / of, between = size + (end > first ? 1 : -1);
    int rest = position - low * size;
    if (rest < 0) return position / size;
    if (rest < (high - low) * between) return low + rest / between;
    rest -= (high - low) * between;
    return size > 0 ? high + rest / size : of - 1;
}

struct Home { int rank, row; };                           // whose a token is, and which of its rows

__device__ __forceinline__ Home home_of(Sequence s, int position, int cp_size, int of) {
    const int chunk = chunk_at(s, position, of), rank = rank_of(chunk, cp_size, of);
    int row = rows_before(s.first, cp_size, of, rank) + position - chunk_start(s, chunk, of);
    if (part_of(chunk, cp_size, of)) row += chunk_size(s, rank, of);
    return {rank, row};
}

// The position of the i-th token that a rank has of a sequence.
__device__ __forceinline__ int position_in(Sequence s, int i, int cp_size, int of, int rank) {
    const int size = chunk_size(s, rank, of);
    if (i < size) return chunk_start(s, rank, of) + i;
    return chunk_start(s, of - 1 - rank, of) + i - size;
}
