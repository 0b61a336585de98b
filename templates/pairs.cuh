// pairs: makes the rotated elements of a head interleaved pairs, if TO_PAIRS, or halves. The norm before it has the
// lanes and the sums of a call that keeps its pairs. x: the lane's part, from `dim` on; has: it is of q or k. All
// threads of a team call this.
template <bool TO_PAIRS>
DEVICE void reorder(Elements& x, int dim, bool rotary, bool has) {
    constexpr int HALF = ROTARY_DIM / 2;
    float* head = shared_head();
    const auto place_of = [&](int i) { return dim - ROTARY_OFFSET + dims_to(i / VEC, INTERLEAVED) + i % VEC; };
    for (int i = 0; i < ELEMENTS; ++i) {
        const int from = place_of(i), to = TO_PAIRS ? from % HALF * 2 + from / HALF : from % 2 * HALF + from / 2;
        if (has && rotary) head[to] = x[i];
    }
    sync_team();
    for (int i = 0; i < ELEMENTS; ++i)
        if (has && rotary) x[i] = head[place_of(i)];
    sync_team();                                         // the next head may be written
}

struct Reorder {
    static constexpr bool WHOLE = true;
    DEVICE void apply(const Own& own, Elements& x, Chunks& chunks) const {
        reorder<INTERLEAVED_OUT>(x, own.part.dim, own.part.rotary, own.here && !own.head.is_v);
        if (STORES_T && !own.head.is_v) pack_head(x, chunks);
    }
    // The output's gradient.
    DEVICE void back(const Own& own, Chunks& chunks) const {
        Elements g;
        unpack_head(chunks, g);
        reorder<INTERLEAVED>(g, own.part.dim, own.part.rotary, own.here && !(V_NORM && own.head.is_v));
        pack_head(g, chunks);
    }
};
