// Stages before the store that need many elements of a head: its Hadamard transform, and the scale of the head or of
// each GROUP of its elements, by which the largest element becomes the largest number of the output. All threads of a
// warp call them, because they exchange elements.

constexpr bool WHOLE_HEAD = HADAMARD || DYNAMIC || REORDERS;
constexpr bool DYNAMIC_V = DYNAMIC_Q && CONVERT_V;       // v has scales of its own too
constexpr bool GROUPED = DYNAMIC && GROUP != 0 && GROUP < HEAD_DIM;
constexpr int SCALES = GROUPED ? ACCESSES : 1;           // scales of a lane's part of a head: an access is in one group
constexpr int WIDTH = TEAM < 32 ? TEAM : 32;             // threads that transform a head
constexpr int USED = HEAD_DIM < WIDTH ? HEAD_DIM : WIDTH;         // those of them that have elements
constexpr int SPAN = HEAD_DIM / USED;                    // neighbouring elements of each of them
// The chunks of the lanes are in order: element i of a chunk, then the lane's number in its part, then the chunk, then
// the number of the part that is as large as the rotated one.
constexpr bool IN_ORDER = TEAM <= 32 && TEAM == LANES && (REST == 0 || ALIKE);

// Sums and differences of elements 1, 2, 4, ... apart.
template <int COUNT>
__device__ __forceinline__ void add_neighbours(float* x) {
    #pragma unroll
    for (int step = 1; step < COUNT; step *= 2)
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (!(i & step)) {
                const float a = x[i], b = x[i + step];
                x[i] = __fadd_rn(a, b), x[i + step] = __fadd_rn(a, -b);
            }
}

// The same for the elements of threads `begin`, 2 begin, ... apart, before `end`.
template <int COUNT>
__device__ __forceinline__ void add_threads(float* x, int begin, int end) {
    #pragma unroll
    for (int step = begin; step < end; step *= 2) {
        const float sign = threadIdx.x & step ? -1.0f : 1.0f;
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(~0u, x[i], step));
    }
}

// 1 / sqrt(n) for a power of two.
__device__ constexpr float inverse_root(int n) {
    return n == 1 ? 1.0f : n == 2 ? 0.70710678f : 0.5f * inverse_root(n / 4);
}

// Multiplies a head by the orthogonal Hadamard matrix in Sylvester's order, from the lowest bit of an element's number
// to the highest. x: the lane's part of the head, `count` elements from `dim` on; has: the thread has a part; wanted:
// the head is transformed.
__device__ __forceinline__ void transform(
    float (&x)[ELEMENTS], int dim, int count, bool rotary, bool has, bool wanted
) {
    float y[ELEMENTS];
    #pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) y[i] = x[i];
    if constexpr (IN_ORDER) {
        #pragma unroll
        for (int c = 0; c < CHUNKS; ++c) add_neighbours<CHUNK>(y + c * CHUNK);
        add_threads<ELEMENTS>(y, 1, ROTARY_LANES);
        #pragma unroll
        for (int i = 0; i < CHUNK && CHUNKS == 2; ++i) {
            const float a = y[i], b = y[(i + CHUNK) % ELEMENTS];
            y[i] = __fadd_rn(a, b), y[(i + CHUNK) % ELEMENTS] = __fadd_rn(a, -b);
        }
        add_threads<ELEMENTS>(y, ROTARY_LANES, TEAM);
    } else {
        const int thread = threadIdx.x % TEAM;
        float* head = shared_head();
        #pragma unroll
        for (int i = 0; i < ELEMENTS; ++i)
            if (has && wanted && i < count)
                head[dim + dims_to(i / VEC, INTERLEAVED_OUT, rotary) + i % VEC] = y[i];
        sync_team();
        if (thread < WIDTH) {
            const bool uses = USED == WIDTH || thread < USED;
            float own[SPAN] = {};
            #pragma unroll
            for (int i = 0; i < SPAN; ++i)
                if (uses) own[i] = head[thread * SPAN + i];
            add_neighbours<SPAN>(own);
            add_threads<SPAN>(own, 1, USED);
            #pragma unroll
            for (int i = 0; i < SPAN; ++i)
                if (uses) head[thread * SPAN + i] = own[i];
        }
        sync_team();
        #pragma unroll
        for (int i = 0; i < ELEMENTS; ++i)
            if (has && wanted && i < count)
                y[i] = head[dim + dims_to(i / VEC, INTERLEAVED_OUT, rotary) + i % VEC];
        sync_team();                                     // the next head may be written
    }
    #pragma unroll
    for (int i = 0; i < ELEMENTS; ++i)
        if (wanted) x[i] = __fmul_rn(y[i], inverse_root(HEAD_DIM));
}

__device__ constexpr float largest_of(fp8) { return 448.0f; }
__device__ constexpr float largest_of(fp8_e5m2) { return 57344.0f; }
__device__ constexpr float largest_of(int8) { return 127.0f; }
__device__ constexpr float largest_of(fp4) { return 6.0f; }
template <typename Other>
__device__ constexpr float largest_of(Other) { return 1.0f; }       // not converted

// The larger of a size and the size of b. NaN is the largest.
__device__ __forceinline__ float larger(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(fabsf(b)));
    return result;
#else
    return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b) & 0x7fffffffu));
#endif
}

template <typename T> constexpr bool IS_FP8 = false;
template <> constexpr bool IS_FP8<fp8> = true;
template <typename T> constexpr bool IS_FP32 = false;
template <> constexpr bool IS_FP32<float> = true;
constexpr bool TWO_LEVELS = IS_FP8<ScaleOut>;            // scales count in units of a given one, of the `whole` tensor
constexpr bool ROUNDED = !IS_FP32<ScaleOut>;             // scales are rounded before elements are divided
constexpr float LARGEST = BLOCK_CACHE ? largest_of(KvOut{}) : largest_of(QOut{});
constexpr float SMALLEST = ROUNDED ? 0.0f : 1e-12f;      // in place of the largest of zeros

__device__ __forceinline__ ScaleOut as_stored(float scale) {
    ScaleOut stored;
    from_float(scale, stored);
    return stored;
}
__device__ __forceinline__ float scale_for(float largest, float whole) {
    float scale = __fmul_rn(largest, 1.0f / LARGEST);    // as torch divides by a number on a GPU
    if constexpr (TWO_LEVELS) scale = whole == 0.0f ? 0.0f : __fmul_rn(scale, __frcp_rn(whole));
    return ROUNDED ? to_float(as_stored(scale)) : scale;
}
// The factor of elements with a scale. TWO_LEVELS: elements with the scale 0 become zeros.
__device__ __forceinline__ float factor_for(float scale, float whole) {
    const float unit = __fmul_rn(scale, whole);
    return unit == 0.0f ? 0.0f : __frcp_rn(unit);
}

// The scale of a head, in every thread of its team. x: the lane's part, and zeros; has: the thread has a part.
__device__ __forceinline__ float scale_of_head(const float (&x)[ELEMENTS], bool has, float whole) {
    float largest = SMALLEST;
    #pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) largest = larger(largest, x[i]);
    if (TEAM > LANES && !has) largest = 0.0f;
    #pragma unroll
    for (int step = WIDTH / 2; step > 0; step /= 2)
        largest = larger(largest, __shfl_xor_sync(~0u, largest, step));
    if constexpr (TEAM > 32) {
        __shared__ float of_warps[THREADS / 32];
        const int first = threadIdx.x / TEAM * (TEAM / 32);
        of_warps[threadIdx.x / 32] = largest;
        __syncthreads();
        for (int w = 0; w < TEAM / 32; ++w) largest = larger(largest, of_warps[first + w]);
        __syncthreads();                                 // the next head may be written
    }
    return scale_for(largest, whole);
}

constexpr int EACH = GROUPED ? GROUP / VEC : 1;          // accesses of a group
// The accesses of a group are those of neighbouring lanes of a warp.
constexpr bool NEIGHBOURS = COPY_LANES == 0 && CHUNK == VEC && !(MIXED && INTERLEAVED_OUT) && EACH <= 32
    && LANES % EACH == 0 && TEAM % EACH == 0;

__device__ __forceinline__ float largest_of_access(const float* x) {
    float most = SMALLEST;
    #pragma unroll
    for (int i = 0; i < VEC; ++i) most = larger(most, x[i]);
    return most;
}

// The scales of a lane's accesses, from the largest elements of all accesses of the head. dim: the lane's first.
__device__ __forceinline__ void scales_of_groups(
    const float (&x)[ELEMENTS], int dim, int count, bool rotary, bool has, float whole, float (&scales)[SCALES]
) {
    if constexpr (NEIGHBOURS) {
        #pragma unroll
        for (int n = 0; n < SCALES; ++n) {
            float most = largest_of_access(x + n * VEC);
            #pragma unroll
            for (int step = 1; step < EACH; step *= 2) most = larger(most, __shfl_xor_sync(~0u, most, step));
            scales[n] = scale_for(most, whole);
        }
    } else {
        constexpr int STEP = EACH % 4 ? 1 : 4;
        alignas(16) __shared__ float largest[THREADS / TEAM][HEAD_DIM / VEC];
        float* of_head = largest[threadIdx.x / TEAM];
        #pragma unroll
        for (int n = 0; n < SCALES; ++n)
            if (has && n * VEC < count)
                of_head[(dim + dims_to(n, INTERLEAVED_OUT, rotary)) / VEC] = largest_of_access(x + n * VEC);
        sync_team();
        #pragma unroll
        for (int n = 0; n < SCALES; ++n) {
            if (!has || n * VEC >= count) continue;
            const float* group = of_head + (dim + dims_to(n, INTERLEAVED_OUT, rotary)) / (EACH * VEC) * EACH;
            float most = SMALLEST;
            #pragma unroll
            for (int i = 0; i < EACH; i += STEP) {
                const Vec<float, STEP> some = load<float, STEP>(group + i);
                #pragma unroll
                for (int j = 0; j < STEP; ++j) most = larger(most, some.item[j]);
            }
            scales[n] = scale_for(most, whole);
        }
        sync_team();                                     // the next head may be written
    }
}

// PER_ROW: the largest scale of a head that a thread has seen in a batch row, or in a packed sequence. Few tokens have
// a larger one than those before them, and for the others a walk does not wait for memory. Scales are at least 0, so
// their bits are ordered as they are, and NaN is the largest.
struct Largest {
    int batch = -1;
    unsigned int bits = 0;

    __device__ __forceinline__ bool covers(int row, float x) const {
        return row == batch && __float_as_uint(x) <= bits;
    }

    // Raises the number at an address to x, if x is larger.
    __device__ __forceinline__ void raise(unsigned int* address, int row, float x) {
        const unsigned int own = __float_as_uint(x), there = *const_cast<volatile unsigned int*>(address);
        if (own > there) atomicMax(address, own);
        batch = row, bits = max(own, there);
    }
};

// SWIZZLED: the offset of a scale in those of its head, which are tiles of 128 tokens and 4 groups, one after the other
// along the groups. In a tile tokens 32 apart are neighbours (cuBLAS' "1D Block Scaling Factors Layout").
__device__ __forceinline__ long long offset_in_tiles(int token, int group) {
    constexpr unsigned int TILES = (HEAD_DIM / (GROUPED ? GROUP : HEAD_DIM) + 3) / 4;
    const unsigned int row = token, column = group;
    const unsigned int in_tile = row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
    return (static_cast<long long>(row / 128) * TILES + column / 4) * 512 + in_tile;
}

// Stores a scale of a head. dim: the first element that has it. HAS: DYNAMIC_V; a template, because other kernels have
// no such arguments.
template <bool HAS, typename Arguments>
__device__ __forceinline__ void store_scale(
    const Arguments& p, const Head& head, const Place& place, const Row& row, int dim, float scale, Largest& largest
) {
    if (PER_ROW && largest.covers(row.batch, scale)) return;
    const Strides* strides = &p.scale_stride[head.is_q ? 0 : 1];
    ScaleOut* first = p.scale_out[head.is_q ? 0 : 1];
    if constexpr (HAS)
        if (head.is_v) strides = &p.v_scale_stride, first = static_cast<ScaleOut*>(p.v_scale_out);
    const Strides& stride = *strides;
    const int group = GROUPED ? dim / (GROUPED ? GROUP : 1) : 0;
    ScaleOut* out = first
        + (SWIZZLED ? offset_in_tiles(place.token, group) : stride.token.step(place.token))
        + head.step(stride.group, stride.head);
    if constexpr (PER_ROW) out += stride.batch.step(row.batch);
    else if constexpr (!ONE_ROW) out += stride.batch.step(place.batch);
    if constexpr (GROUPED && !SWIZZLED) out += group;
    if constexpr (PER_ROW) largest.raise(reinterpret_cast<unsigned int*>(out), row.batch, scale);
    else *out = as_stored(scale);
}

// Stores a scale of a head of k or v beside the cache, in the row of the token; CLEAR_PAGE: and zeros in the rows after
// the last. The rows are in fours: stride.token leads to the next four, stride.head to the next row. HAS: BLOCK_CACHE;
// a template, because other kernels have no such arguments.
template <bool HAS, typename Arguments>
__device__ __forceinline__ void store_block_scale(
    const Arguments& p, const Head& head, const Destination& slot, int dim, float scale
) {
    if constexpr (HAS) {
        if (!slot.valid) return;
        const Strides& stride = p.block_scale_stride[head.is_v];
        ScaleOut* scales = static_cast<ScaleOut*>(p.block_scale[head.is_v]) + stride.batch.step(slot.place.batch)
            + stride.group.step(head.index) + stride.dim.step(GROUPED ? dim / (GROUPED ? GROUP : 1) : 0);
        const auto at = [&](int row) { return scales + (stride.token.step(row / 4) + stride.head.step(row % 4)); };
        from_float(scale, *at(slot.place.token));
        if constexpr (CLEAR_PAGE)
            for (int row = slot.place.token + 1; slot.last && row < PAGE_SIZE; ++row) *at(row) = ScaleOut{};
    }
}
