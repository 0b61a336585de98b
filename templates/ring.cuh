// RING: a thread's next heads, on their way to shared memory while it works on its heads of this token.
//
// A thread copies them to slots of its own, asynchronously, after it has taken what is there. No other thread reads the
// slots, so there is no barrier.

// Begins to copy an access of 8 or 16 bytes. Before sm_80 it is copied at once.
template <typename Element, int N>
DEVICE void begin_copy(Vec<Element, N>* to, const Element* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const unsigned int address = static_cast<unsigned int>(__cvta_generic_to_shared(to));
    if constexpr (sizeof(Element) * N == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(address), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
            :: "r"(address), "l"(from), "n"(sizeof(Element) * N) : "memory");
#else
    *to = load<Element, N>(from);
#endif
}

// Waits until all copies of the thread are there.
DEVICE void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Rows that must be loaded or searched for are kept for the next token, and not found again.
constexpr bool EARLY_ROWS = RING && (POSITION_IDS || PACKED);

// Where a token of a walk lies. Most calls have one batch row, and then nothing is divided.
DEVICE Place place_in_walk(const Params& p, unsigned int index) {
    if (RING && p.batch == 1) return {0, static_cast<int>(index)};
    return place_of(p, index);
}

// COUNT accesses of each thread. Neighbouring threads have neighbouring slots.
template <int COUNT>
struct Slots {
    Vec<T, VEC> (*slots)[THREADS];                       // COUNT of them, in shared memory

    // Begins to copy a lane's part of a head to the slots from `first` on.
    DEVICE void fill(int first, const Lane<const T>& head, int lane, bool interleaved) const {
        const bool rotary = COPY_LANES == 0 || lane < ROTARY_LANES;
        for (int n = 0; n < ACCESSES; ++n)
            if (rotary || n < COPY_ACCESSES)
                begin_copy(&slots[first + n][threadIdx.x], head[dims_to(n, interleaved, rotary)]);
    }

    // The first `accesses` of them, and zeros.
    DEVICE Chunks take(int first, int accesses) const {
        Chunks chunks = {};
        for (int n = 0; n < ACCESSES; ++n)
            if (n < accesses) chunks.x[n] = slots[first + n][threadIdx.x];
        return chunks;
    }
};

// ---- where the heads of a walk lie -------------------------------------------------------------

constexpr bool EVEN = Q_PER_GROUP == 1 && KV_PER_GROUP == 1;     // the heads of a tensor are a stride apart

// A lane's part of a head in each token of a walk, found from its address in token 0 of batch row 0, which stays in
// registers. Strides but that of `dim` are in bytes, so that each step is one multiply and add.
template <typename Element>
struct Track {
    unsigned long long first;
    Axis batch, token, group, dim;

    Track() = default;
    DEVICE Track(const Lane<Element>& lane, const Strides& strides)
        : first(reinterpret_cast<unsigned long long>(lane.first)), batch(bytes(strides.batch)),
          token(bytes(strides.token)), group(bytes(strides.group)), dim(lane.dim) {
#if defined(__CUDA_ARCH__)
        asm volatile("" : "+l"(first));                  // otherwise it is found again for each token
#endif
    }
    static DEVICE Axis bytes(const Axis& axis) {
        return {axis.stride * static_cast<Stride>(sizeof(Element))};
    }
    // At a token; EVEN: of the head `heads` further on.
    DEVICE Lane<Element> at(const Place& place, int heads) const {
        unsigned long long address = token.step(place.token) + (first + group.step(heads));
        if constexpr (!ONE_ROW) address += batch.step(place.batch);
        return {reinterpret_cast<Element*>(address), dim};
    }
};
