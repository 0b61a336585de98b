// Where the tokens of a packed batch lie among the ranks' shards; the rule is in sequences.cuh.
//
// There are fewer than 2^31 tokens.

DEVICE int rank_of(int chunk, int cp_size, int chunks) {
    return chunks == cp_size || chunk < cp_size ? chunk : chunks - 1 - chunk;
}

// How many of a rank's chunks come before `chunk` in a sequence: none or one.
DEVICE int part_of(int chunk, int cp_size, int chunks) {
    return chunks > cp_size && chunk >= cp_size;
}

struct Sequence { int first, end; };                      // its tokens in the batch

DEVICE int chunk_start(Sequence s, int chunk, int chunks) {
    return static_cast<int>(chunk_before(s.end, chunk, chunks) - chunk_before(s.first, chunk, chunks));
}
DEVICE int chunk_size(Sequence s, int chunk, int chunks) {
    return static_cast<int>(chunk_count(s.end, chunk, chunks) - chunk_count(s.first, chunk, chunks));
}

// A rank's first row of the sequence, and the position of one of its rows.
DEVICE int begin_of(Sequence s, int cp_size, int chunks, int rank) {
    return static_cast<int>(local_offset(s.first, cp_size, chunks, rank));
}
DEVICE int position_at(Sequence s, int row, int cp_size, int chunks, int rank) {
    return static_cast<int>(
        position_of(row - begin_of(s, cp_size, chunks, rank), s.first, s.end, cp_size, chunks, rank)
    );
}

// The chunk of a position. The first `low` chunks and those from `high` on have `size` tokens; the chunks between have
// one more or one less.
DEVICE int chunk_at(Sequence s, int position, int chunks) {
    const int first = s.first % chunks, end = s.end % chunks;
    const int low = min(first, end), high = max(first, end);
    const int size = s.end / chunks - s.first / chunks, between = size + (end > first ? 1 : -1);
    int rest = position - low * size;
    if (rest < 0) return position / size;
    if (rest < (high - low) * between) return low + rest / between;
    rest -= (high - low) * between;
    return size > 0 ? high + rest / size : chunks - 1;
}

struct Home { int rank, row; };                           // the rank that owns a token, and its row there

DEVICE Home home_of(Sequence s, int position, int cp_size, int chunks) {
    const int chunk = chunk_at(s, position, chunks), rank = rank_of(chunk, cp_size, chunks);
    int row = begin_of(s, cp_size, chunks, rank) + position - chunk_start(s, chunk, chunks);
    if (part_of(chunk, cp_size, chunks)) row += chunk_size(s, rank, chunks);
    return {rank, row};
}
