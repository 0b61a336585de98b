// Where a token's k and v go in a cache, whose batch axis is the page: by a slot, or by the pages of its sequence.

// A place that is not valid is not written. last: PAGED: of the last token of a sequence.
struct Destination { Place place; bool valid, last; };

// PAGED: the new tokens of a sequence are its last ones. BATCH_INDICES: lengths are the tokens' positions. Tokens after
// the last sequence, of a negative sequence, and of one without a length, are padding. Where a table leads out of a
// tensor, the token's thread that `counts` adds an error. Numbers are unsigned, so those below zero are far too large.
// Arguments: `Params`; other kernels have no tables.
template <typename Arguments>
__device__ __forceinline__ Destination destination_in_pages(const Arguments& p, long long token, bool counts) {
    using Count = unsigned long long;
    long long sequence;
    Count left = 0;                                      // tokens of the sequence from this one on
    if constexpr (BATCH_INDICES) {
        sequence = p.batch_indices[token];
        if (sequence < 0) return {};
    } else if constexpr (CU_SEQLENS_Q) {
        sequence = find_between(p.cu_seqlens_q, 0, p.sequences, token + 1);
        if (sequence >= p.sequences) return {};
        left = static_cast<Count>(p.cu_seqlens_q[sequence + 1]) - token;
    } else {
        const unsigned int index = static_cast<unsigned int>(token), count = static_cast<unsigned int>(p.new_tokens);
        sequence = index / count;
        left = count - index % count;
    }
    const bool known = !BATCH_INDICES || sequence < p.sequences;
    const Count width = p.page_table_width;
    Count first, pages;                                  // the first page's place in the table; pages of the sequence
    if constexpr (PAGE_INDPTR) {
        first = known ? p.page_indptr[sequence] : 0;
        pages = known ? static_cast<Count>(p.page_indptr[sequence + 1]) - first : 0;
    } else {
        first = static_cast<Count>(sequence) * p.page_table_stride;
        pages = known ? width : 0;
    }
    Count position, length = ~Count{0};
    if constexpr (BATCH_INDICES) {
        position = p.lengths[token];
    } else {
        length = p.lengths[sequence];                    // PAGE_INDPTR: of its last page
        if constexpr (PAGE_INDPTR) length = pages ? (pages - 1) * PAGE_SIZE + length : 0;
        if (length == 0) return {};
        position = length - left;
    }
    const Count number = position / PAGE_SIZE, at = first + number;
    const bool any = static_cast<long long>(pages) > 0;  // not where page_indptr falls
    if (position < length && any && number < pages && (!PAGE_INDPTR || (first < width && at < width))) {
        const Count page = p.page_table[at];
        const Place found = {static_cast<int>(page), static_cast<int>(position % PAGE_SIZE)};
        if (page < static_cast<Count>(p.page_count)) return {found, true, left == 1};
    }
    if (p.errors && counts) atomicAdd(p.errors, 1);
    return {};
}

// A negative slot is padding.
template <typename Arguments>
__device__ __forceinline__ Destination destination_of_slot(const Arguments& p, long long token) {
    const long long slot = p.slot_mapping[token];
    const unsigned int row = static_cast<unsigned int>(slot), page = PAGE_SIZE ? PAGE_SIZE : ~0u;
    const Place found = {static_cast<int>(row / page), static_cast<int>(row % page)};
    return {found, slot >= 0 && slot < p.slot_count, false};
}

__device__ __forceinline__ Destination destination_of(const Params& p, const Place& place, bool counts) {
    const long long token = ONE_ROW ? place.token : place.batch * p.seqlen + place.token;
    if constexpr (PAGED) return destination_in_pages(p, token, counts);
    else return destination_of_slot(p, token);
}
