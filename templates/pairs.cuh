// pairs: makes the rotated elements of a head interleaved pairs, if TO_PAIRS, or halves. The norm before it has the
// lanes and the sums of a call that keeps its pairs. has: the thread's head is of q or k. All threads of a team call
// this.
template <bool TO_PAIRS>
DEVICE void reorder(const Part& part, bool has, Elements& x) {
    constexpr int HALF = ROTARY_DIM / 2;
    float* head = shared_head();
    for (int i = 0; i < ELEMENTS; ++i) {
        const int from = part.dim_of(i) - ROTARY_OFFSET;
        const int to = TO_PAIRS ? from % HALF * 2 + from / HALF : from % 2 * HALF + from / 2;
        if (has && part.rotary) head[to] = x[i];
    }
    sync_team();
    for (int i = 0; i < ELEMENTS; ++i)
        if (has && part.rotary) x[i] = head[part.dim_of(i) - ROTARY_OFFSET];
    sync_team();                                         // the next head may be written
}

struct Reorder {
    static constexpr bool WHOLE = true;
    DEVICE void apply(const Own& own, Elements& x, Chunks& chunks) const {
        reorder<INTERLEAVED_OUT>(own.part, own.here && !own.head.is_v, x);
        if (STORES_T && !own.head.is_v) pack_head(x, chunks);
    }
    // The output's gradient.
    DEVICE void back(const Own& own, Chunks& chunks) const {
        Elements g;
        unpack_head(chunks, g);
        reorder<INTERLEAVED>(own.part, own.here && !(V_NORM && own.head.is_v), g);
        pack_head(g, chunks);
    }
};
