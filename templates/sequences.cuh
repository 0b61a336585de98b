// Which packed sequence a token is in, and its position: the only copy of these rules on the device.
//
// cu_seqlens[0..count] are the offsets of `count` sequences, ascending from 0; sequence i owns the
// tokens [cu_seqlens[i], cu_seqlens[i + 1]) and may be empty. Under context parallelism they are those
// of the whole batch, and a rank owns 1 / cp_size of each sequence: the local offsets are
// cu_seqlens[i] / cp_size. cp_size is a compile-time constant wherever these are called.

// The sequence of a rank's `token`, or `count` if the token lies after the last one. The lanes of a warp
// search together: 32 probes a step, so a million sequences take four steps. No probe divides:
// offset / cp_size <= token is offset < (token + 1) * cp_size.
template <typename Index>
__device__ __forceinline__ long long find_sequence(
    const Index* cu_seqlens, long long count, long long token, int cp_size
) {
    const int lane = threadIdx.x % 32;
    const long long target = (token + 1) * cp_size;
    long long low = 0, high = count;                 // the answer is in [low, high]
    while (low < high) {
        const long long part = (high - low + 31) / 32;   // sequences a lane stands for
        const long long first = low + lane * part;
        const bool ended = first < high                  // all of them end at or before the token
            && static_cast<long long>(cu_seqlens[min(first + part, high)]) < target;
        low = min(high, low + __popc(__ballot_sync(~0u, ended)) * part);
        high = min(high, low + part - 1);
    }
    return low;
}

// The same by one thread alone, between the sequences of two tokens around it.
template <typename Index>
__device__ __forceinline__ long long find_between(
    const Index* cu_seqlens, long long low, long long high, long long token, int cp_size
) {
    const long long target = (token + 1) * cp_size;
    while (low < high) {
        const long long middle = (low + high) >> 1;
        if (static_cast<long long>(cu_seqlens[middle + 1]) < target) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The position in its sequence of the i-th of the n tokens that rank `cp_rank` has of it. A sequence is
// cut into 2 cp_size chunks; a rank has chunks cp_rank and 2 cp_size - 1 - cp_rank ("dual chunk").
__device__ __forceinline__ long long position_of(long long i, long long n, int cp_size, long long cp_rank) {
    if (cp_size == 1) return i;
    const long long half = n / 2;
    return i + (i < half ? cp_rank * half : n * cp_size - (cp_rank + 1) * half - half);
}
