// Where a thread of a norm reads and stores its heads.

// A thread finds its heads once for all its tokens. Some kernels have no registers for it: with a scale for each group
// of a cached head, or torch's sum of single squares.
constexpr bool TRACKED = RING && !(TWO_STREAMS || GATED || ACROSS_HEADS || BLOCK_CACHE) && LEAF > 1;

struct Tracks {
    static constexpr int COUNT = EVEN ? 1 : STEPS;

    Track<const T> sources[COUNT];
    Track<T> outputs[COUNT];

    // A lane of the heads from `first` on.
    DEVICE Tracks(const Params& p, int first, int lane) {
        if constexpr (!TRACKED) return;
        const int dim = first_dim(lane, INTERLEAVED);
        const Head nearest(p, first);                    // the others are in the same tensor
        for (int s = 0; s < COUNT; ++s) {
            const Head head(nearest, s);
            sources[s] = {head.input(p, {}, dim), head.of(p.in_stride)};
            outputs[s] = {head.output<T>(p, {}, dim), head.of(p.out_stride)};
        }
    }
    // Head s of them at a token.
    DEVICE Lane<const T> source(const Params& p, int s, const Head& head, const Place& place, int dim) const {
        return TRACKED ? sources[s % COUNT].at(place, EVEN ? s : 0) : source_of(p, head, place, dim);
    }
    DEVICE Lane<T> output(const Params& p, int s, const Head& head, const Place& place, int dim) const {
        return TRACKED ? outputs[s % COUNT].at(place, EVEN ? s : 0) : head.output<T>(p, place, dim);
    }
};
