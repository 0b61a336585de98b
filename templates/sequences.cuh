// Which packed sequence a token is in: the only copy of that rule on the device.
//
// cu_seqlens[0..count] are the offsets of `count` sequences, ascending from 0; sequence i owns the
// tokens [cu_seqlens[i], cu_seqlens[i + 1]). An empty sequence owns none.

// The sequence of `token`, or `count` if the token lies after the last one.
template <typename Index>
__device__ __forceinline__ long long find_sequence(
    const Index* cu_seqlens, long long count, long long token
) {
    long long low = 0;
    long long high = count;                      // the answer is in [low, high]
    while (low < high) {
        const long long middle = (low + high) >> 1;
        if (static_cast<long long>(cu_seqlens[middle + 1]) <= token) low = middle + 1;
        else high = middle;
    }
    return low;
}
