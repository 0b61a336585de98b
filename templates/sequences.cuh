// Which packed sequence a token is in, and its position: the only copy of these rules on the device.
//
// cu_seqlens[0..count] are the offsets of `count` sequences, ascending from 0; sequence i owns the
// tokens [cu_seqlens[i], cu_seqlens[i + 1]) and may be empty. Under context parallelism these are the offsets of
// the whole batch, and each sequence is cut into `chunks` parts by the rule of jitrope/base/partition.py. With
// chunks = 2 cp_size a rank has chunk cp_rank followed by chunk chunks - 1 - cp_rank ("dual chunk"); with
// chunks = cp_size it has chunk cp_rank ("contiguous"). Both numbers are compile-time constants in every call, so
// divisions by them become multiplications.

// Counts those of the first `offset` tokens of the batch that are in chunk number `chunk` of their sequences.
template <typename Index>
DEVICE long long chunk_count(Index offset, int chunk, int chunks) {
    return static_cast<long long>(offset / chunks) + (static_cast<int>(offset % chunks) > chunk);
}

// Counts those of the first `offset` tokens of the batch that are in the chunks before `chunk`.
template <typename Index>
DEVICE long long chunk_before(Index offset, int chunk, int chunks) {
    return static_cast<long long>(offset / chunks) * chunk + min(static_cast<int>(offset % chunks), chunk);
}

// Counts those of the first `offset` tokens of the batch that a rank has.
template <typename Index>
DEVICE long long local_offset(Index offset, int cp_size, int chunks, int cp_rank) {
    if (chunks == 1) return offset;
    const long long head = chunk_count(offset, cp_rank, chunks);
    return chunks == cp_size ? head : head + chunk_count(offset, chunks - 1 - cp_rank, chunks);
}

// The least offset whose local offset is past a rank's `token`. Chunk c grows at c + 1, chunks + c + 1, ..., so the
// two chunks of a rank grow in turn.
DEVICE long long offset_past(long long token, int cp_size, int chunks, int cp_rank) {
    if (chunks == cp_size) return token * chunks + cp_rank + 1;
    return (token >> 1) * chunks + (token & 1 ? chunks - cp_rank : cp_rank + 1);
}

// The first of `count` sequences whose end is at least `target`, or `count`. With target = offset_past(token) this is
// the sequence of a rank's token, and no probe divides: local_offset(end) <= token means end < offset_past(token). The
// lanes of a warp search together: 32 probes a step, so a million sequences take four steps.
template <typename Index>
DEVICE long long find_sequence(const Index* cu_seqlens, long long count, long long target) {
    const int lane = threadIdx.x % 32;
    long long low = 0, high = count;                 // the answer is in [low, high]
    while (low < high) {
        const long long part = (high - low + 31) / 32;   // sequences of a lane
        const long long first = low + lane * part;
        const bool ended = first < high                  // all of them end at or before the token
            && static_cast<long long>(cu_seqlens[min(first + part, high)]) < target;
        low = min(high, low + __popc(__ballot_sync(~0u, ended)) * part);
        high = min(high, low + part - 1);
    }
    return low;
}

// The same search by one thread alone, between two sequences.
template <typename Index>
DEVICE long long find_between(const Index* cu_seqlens, long long low, long long high, long long target) {
    while (low < high) {
        const long long middle = (low + high) >> 1;
        if (static_cast<long long>(cu_seqlens[middle + 1]) < target) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The position of the i-th token that a rank has of a sequence, which is the tokens [first, end) of the batch.
template <typename Index>
DEVICE long long position_of(long long i, Index first, Index end, int cp_size, int chunks, int cp_rank) {
    if (chunks == 1) return i;
    if (chunks == cp_size) return chunk_before(end, cp_rank, chunks) - chunk_before(first, cp_rank, chunks) + i;
    const long long head = chunk_count(end, cp_rank, chunks) - chunk_count(first, cp_rank, chunks);
    const int chunk = i < head ? cp_rank : chunks - 1 - cp_rank;
    return chunk_before(end, chunk, chunks) - chunk_before(first, chunk, chunks) + (i < head ? i : i - head);
}

// The same for a sequence that is not packed, with equal chunks. A rank has n tokens of it; n is even.
DEVICE long long position_in_equal_chunks(long long i, long long n, int cp_size, int cp_rank) {
    if (cp_size == 1) return i;
    const long long half = n / 2;
    return i + (i < half ? cp_rank : 2 * cp_size - 2 - cp_rank) * half;
}
