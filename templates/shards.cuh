// Where the tokens of a packed batch lie among the ranks' shards; the rule is in sequences.cuh.
//
// There are fewer than 2^31 tokens.

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

// The first of a rank's rows that are the sequence's, and the position of one of them.
__device__ __forceinline__ int begin_of(Sequence s, int cp_size, int of, int rank) {
    return static_cast<int>(local_offset(s.first, cp_size, of, rank));
}
__device__ __forceinline__ int position_at(Sequence s, int row, int cp_size, int of, int rank) {
    return static_cast<int>(position_of(row - begin_of(s, cp_size, of, rank), s.first, s.end, cp_size, of, rank));
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
    int row = begin_of(s, cp_size, of, rank) + position - chunk_start(s, chunk, of);
    if (part_of(chunk, cp_size, of)) row += chunk_size(s, rank, of);
    return {rank, row};
}
