// What a stage is given: a thread's part of a token, and one of its heads.

struct Part;

// A head of a part. here: the thread has it. turns: it is rotated.
struct Own {
    const Part& part;
    int s;
    Head head;
    bool here, turns;

    // The row of a norm that it is in, among the thread's.
    DEVICE int row() const { return ACROSS_HEADS ? 0 : s; }
};

// A lane of heads first, first + STRIDE, ... before last, if the thread `works`.
struct Job {
    Place place;
    Row row;
    int first, last;
    bool works;

    DEVICE bool has(int s) const { return works && first + s * STRIDE < last; }
};

// Head s of a thread, whose first one is `nearest`, number `first` of the token.
DEVICE Head head_of(const Params& p, const Head& nearest, int first, int s) {
    if constexpr (EACH_HEAD) return Head(p, first + s * STRIDE);
    return Head(nearest, s * STRIDE);
}

struct Part {
    const Place& place;
    const Row& row;
    int begin, end;
    bool works;
    int heads;                                           // from the first one on
    bool stays;                                          // at most the projection's bias is added
    bool rotary, turning;                                // the lane rotates elements; of this token
    int lane, dim, accesses, count;                      // the lane's first element, and how many it has
    bool second;                                         // of the second stream
    Head nearest;

    DEVICE Part(const Params& p, const Job& given, int thread)
        : place(given.place), row(given.row), begin(given.first), end(given.last), works(given.works),
          stays(PACKED && IN_PLACE && row.spare),
          rotary(COPY_LANES == 0 || thread < ROTARY_LANES), turning(rotary && !stays && !is_unrotated(row)),
          lane(CLAMPED ? min(thread, LANES - 1) : thread), dim(first_dim(lane, INTERLEAVED)),
          accesses(rotary ? ACCESSES : COPY_ACCESSES), count(accesses * VEC), second(in_second_stream(p, place)),
          nearest(p, CLAMPED ? min(given.first, given.last - 1) : given.first) {
        works &= (TEAM == LANES || thread < LANES) && (ADDED_BIAS || !stays);
        heads = works ? end - begin : 0;
    }

    // The dim of one of the lane's elements.
    DEVICE int dim_of(int element) const { return dim + dims_to(element / VEC, INTERLEAVED, rotary) + element % VEC; }

    DEVICE Head head(const Params& p, int s) const {
        if constexpr (!CLAMPED) return head_of(p, nearest, begin, s);
        if constexpr (EACH_HEAD) return Head(p, min(begin + s * STRIDE, end - 1));
        return Head(nearest, max(0, min(s * STRIDE, end - 1 - begin)));
    }

    // COUNTED: once, not for each head: HunyuanDiT 1.68 -> 1.60 x a copy on an H200. Elsewhere that may spill.
    DEVICE bool has(int s) const { return COUNTED ? s < heads : works && begin + s * STRIDE < end; }

    // Calls `work` for each of the thread's heads. ALL: also where it has none, because threads exchange elements. In a
    // tile, an idle thread works on the same head as another one.
    template <bool ALL = true, typename Work>
    DEVICE void each(const Params& p, const Work& work) const {
        #pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const bool here = has(s);
            if (!ALL && !CLAMPED && !here) continue;
            const Head own = head(p, s);
            work(Own{*this, s, own, here, (!ALL || here) && turning && !own.is_v});
        }
    }

    // Whether a head of it is more than copied.
    DEVICE bool changes(const Head& head) const {
        return !stays && ((V_NORM && !head.is_gate()) || !head.is_v);
    }
};

// Whether a thread's part of a head is not normalised. NORM_NOPE: a lane's part is rotated, or all of it is not.
DEVICE bool is_plain(const Own& own) { return is_plain(own.head) || (NORM_NOPE && own.part.rotary); }
// Whether it is of the rotated elements of k. PE_CACHE: a cache of their own takes them, without a computed scale.
DEVICE bool is_pe(const Own& own) { return !own.head.is_q && own.part.rotary; }
