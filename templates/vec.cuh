// Aligned vector accesses, and conversion between storage types and fp32.
//
// No CUDA header is needed: bf16 and fp16 are stored as 16 bits, and the conversions are single
// instructions. The text is complete in itself, and half of the compile time is saved.

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
struct fp8 { unsigned char bits; };                                 // e4m3: no infinity, at most 448
struct fp8_e5m2 { unsigned char bits; };                            // at most 57344; infinities are not stored
struct e8m0 { unsigned char bits; };                                // a power of two from 2^-127 on; 255 is NaN
struct e8m0_fp32 { float value; };                                  // the same power of two
struct int8 { signed char value; };                                 // at most 127 in size
struct fp4 { unsigned char bits; };                                 // two of e2m1, at most 6: the first in the low bits

template <typename T> constexpr int PER_ITEM = 1;                   // elements in an item
template <> constexpr int PER_ITEM<fp4> = 2;

#if defined(__CUDA_ARCH__)
__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

__device__ __forceinline__ unsigned short float_to_bfloat(float value) {     // to nearest even
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned short converted;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(converted) : "f"(value));
    return converted;
#else
    const unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;                  // NaN
    return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
}

// The bits of the nearest number (to even) with MANTISSA bits behind the point, without the sign: the WIDTH highest
// bits of the result. size: at most the largest such number. The sum of size and a large power of two ends with the
// number of steps that size is long, a step being the distance of the numbers there. Its exponent gives the count of
// the numbers below, to which BEGIN is added.
template <int WIDTH, int MANTISSA, int BIAS>
__device__ __forceinline__ unsigned int nearest_bits(float size) {
    constexpr unsigned int POINT = 23 - MANTISSA, LEAST = 128 - BIAS;       // LEAST: the exponent of subnormal numbers
    constexpr unsigned int BEGIN = -((LEAST + POINT) << MANTISSA) & ((1u << WIDTH) - 1u);
    constexpr float TIMES = (1u << POINT) + BEGIN / static_cast<float>(1u << MANTISSA);
    const float normal = fmaxf(size, __uint_as_float(LEAST << 23));
    const float power = __uint_as_float(__float_as_uint(normal) & 0x7f800000u);
    const unsigned int counted = __float_as_uint(__fmaf_rn(power, TIMES, size));
    return counted * ((1u << (32 - WIDTH)) + (1u << (32 - WIDTH - POINT)));     // both counts, added at the top
}
// In 8 bits. The sign is the highest.
template <int MANTISSA, int BIAS>
__device__ __forceinline__ unsigned char float_to_byte(float value, float most) {
    const unsigned int bits = nearest_bits<7, MANTISSA, BIAS>(fminf(fabsf(value), most));
    return value != value ? 0x7f : ((__float_as_uint(value) & 0x80000000u) | bits >> 1) >> 24;
}
__device__ __forceinline__ unsigned char float_to_fp8(float value) { return float_to_byte<3, 7>(value, 448.0f); }
__device__ __forceinline__ unsigned char float_to_fp8_e5m2(float value) {
    return float_to_byte<2, 15>(value, 57344.0f);
}

// Two neighbouring elements, the first in the low half: one register, one instruction.
__device__ __forceinline__ unsigned int pack(float first, float second, fp16) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned int word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
#else
    return float_to_half(first) | static_cast<unsigned int>(float_to_half(second)) << 16;
#endif
}
__device__ __forceinline__ unsigned int pack(float first, float second, bf16) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned int word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
#else
    return float_to_bfloat(first) | static_cast<unsigned int>(float_to_bfloat(second)) << 16;
#endif
}

__device__ __forceinline__ unsigned int pack(float first, float second, fp8) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(second), "f"(first));
    return two;
#else
    return float_to_fp8(first) | static_cast<unsigned int>(float_to_fp8(second)) << 8;
#endif
}

__device__ __forceinline__ unsigned int pack(float first, float second, fp8_e5m2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short two;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(second), "f"(first));
    return two;
#else
    return float_to_fp8_e5m2(first) | static_cast<unsigned int>(float_to_fp8_e5m2(second)) << 8;
#endif
}

// NaN becomes 127.
__device__ __forceinline__ unsigned int float_to_int8(float value) {
    return static_cast<unsigned char>(static_cast<signed char>(rintf(fmaxf(fminf(value, 127.0f), -127.0f))));
}
__device__ __forceinline__ unsigned int pack(float first, float second, int8) {
    return float_to_int8(first) | float_to_int8(second) << 8;
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ double to_float(double x) { return x; }              // for fp64 tables
__device__ __forceinline__ float to_float(fp16 x) { return half_to_float(x.bits); }
__device__ __forceinline__ float to_float(bf16 x) {
    return __uint_as_float(static_cast<unsigned int>(x.bits) << 16);
}

__device__ __forceinline__ void from_float(float value, float& x) { x = value; }
__device__ __forceinline__ void from_float(float value, fp16& x) { x.bits = float_to_half(value); }
__device__ __forceinline__ void from_float(float value, bf16& x) { x.bits = float_to_bfloat(value); }
__device__ __forceinline__ void from_float(float value, fp8& x) { x.bits = float_to_fp8(value); }
__device__ __forceinline__ void from_float(float value, fp8_e5m2& x) { x.bits = float_to_fp8_e5m2(value); }
__device__ __forceinline__ void from_float(float value, int8& x) { x.value = float_to_int8(value); }

// A size, rounded up to a power of two.
__device__ __forceinline__ void from_float(float value, e8m0& x) {
    const unsigned int bits = __float_as_uint(value);
    x.bits = bits > 0x7f800000u ? 255 : bits <= 0x400000u ? 0 : min((bits + 0x7fffffu) >> 23, 254u);
}
__device__ __forceinline__ float to_float(fp8 x) {                  // of a size; 2^120, because exponents begin there
    if (x.bits == 0x7fu) return __uint_as_float(0x7fc00000u);
    return __fmul_rn(__uint_as_float(static_cast<unsigned int>(x.bits) << 20), __uint_as_float(247u << 23));
}
__device__ __forceinline__ float to_float(e8m0 x) {
    const unsigned int bits = x.bits;
    return __uint_as_float(bits == 0 ? 0x400000u : bits == 255 ? 0x7fc00000u : bits << 23);
}
__device__ __forceinline__ void from_float(float value, e8m0_fp32& x) {
    e8m0 power;
    from_float(value, power);
    x.value = to_float(power);
}
__device__ __forceinline__ float to_float(e8m0_fp32 x) { return x.value; }

template <int BYTES> struct Word;                                   // one access of BYTES bytes
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned int; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

template <typename T, int N>
union Vec {                                                         // N elements, one access
    typename Word<sizeof(T) * N>::type word;
    unsigned int quad[sizeof(T) * N < 4 ? 1 : sizeof(T) * N / 4];   // its 4-byte words
    T item[N];
};

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load(const T* address) {
    Vec<T, N> v;
    v.word = *reinterpret_cast<const typename Word<sizeof(T) * N>::type*>(address);
    return v;
}

template <typename T, int N>
__device__ __forceinline__ void store(T* address, const Vec<T, N>& v) {
    *reinterpret_cast<typename Word<sizeof(T) * N>::type*>(address) = v.word;
}

// The same, always in one instruction: after a branch NVRTC 13.5 splits the plain store.
template <typename T, int N>
__device__ __forceinline__ void store_whole(T* address, const Vec<T, N>& v) {
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(T) * N == 16) {
        asm volatile("st.global.v4.u32 [%0], { %1, %2, %3, %4 };"
            :: "l"(address), "r"(v.word.x), "r"(v.word.y), "r"(v.word.z), "r"(v.word.w) : "memory");
        return;
    } else if constexpr (sizeof(T) * N == 8) {
        asm volatile("st.global.v2.u32 [%0], { %1, %2 };"
            :: "l"(address), "r"(v.word.x), "r"(v.word.y) : "memory");
        return;
    }
#endif
    store(address, v);
}

// The same, explicitly from global memory: through a few calls NVRTC 13.2 loses the address space for sm_100.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_global(const T* address) {
#if defined(__CUDA_ARCH__)
    __builtin_assume(__isGlobal(address));
#endif
    return load<T, N>(address);
}

// The same for data that other blocks and later launches read again: evicted last from L2. Volatile: otherwise
// NVRTC treats the load as arithmetic and moves it ahead of its condition.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_kept(const T* address) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned long long keep;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
    Vec<T, N> v;
    if constexpr (sizeof(T) * N == 16) {
        asm volatile("ld.global.L2::cache_hint.v4.u32 { %0, %1, %2, %3 }, [%4], %5;"
            : "=r"(v.word.x), "=r"(v.word.y), "=r"(v.word.z), "=r"(v.word.w) : "l"(address), "l"(keep));
    } else if constexpr (sizeof(T) * N == 8) {
        asm volatile("ld.global.L2::cache_hint.v2.u32 { %0, %1 }, [%2], %3;"
            : "=r"(v.word.x), "=r"(v.word.y) : "l"(address), "l"(keep));
    } else if constexpr (sizeof(T) * N == 4) {
        asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(v.word) : "l"(address), "l"(keep));
    } else {
        asm volatile("ld.global.L2::cache_hint.u16 %0, [%1], %2;" : "=h"(v.word) : "l"(address), "l"(keep));
    }
    return v;
#else
    return load<T, N>(address);
#endif
}

// The same for data that is not needed again: evicted first from L1 and L2.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> load_once(const T* address) {
    Vec<T, N> v;
    v.word = __ldcs(reinterpret_cast<const typename Word<sizeof(T) * N>::type*>(address));
    return v;
}

template <typename T, int N, typename Real>
__device__ __forceinline__ void unpack(const Vec<T, N>& v, Real* out) {
    #pragma unroll
    for (int i = 0; i < N; ++i) out[i] = static_cast<Real>(to_float(v.item[i]));
}
template <int N>
__device__ __forceinline__ void unpack(const Vec<bf16, N>& v, float* out) {     // one instruction each
    if constexpr (N == 1) {
        out[0] = to_float(v.item[0]);
    } else {
        #pragma unroll
        for (int i = 0; i < N; ++i)
            out[i] = __uint_as_float(i % 2 ? v.quad[i / 2] & 0xffff0000u : v.quad[i / 2] << 16);
    }
}

// Two neighbouring elements as they come back from a store.
template <typename T>
__device__ __forceinline__ void round_pair(float& first, float& second, T type) {
    const unsigned int word = pack(first, second, type);
    first = half_to_float(word & 0xffffu), second = half_to_float(word >> 16);
}
__device__ __forceinline__ void round_pair(float& first, float& second, bf16 type) {
    const unsigned int word = pack(first, second, type);
    first = __uint_as_float(word << 16), second = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void round_pair(float&, float&, float) {}

template <typename T, int N>
__device__ __forceinline__ void pack(const float* x, Vec<T, N>& v) {
    if constexpr (sizeof(T) == 2 && N > 1) {
        #pragma unroll
        for (int i = 0; i < N; i += 2) v.quad[i / 2] = pack(x[i], x[i + 1], T{});
    } else if constexpr (sizeof(T) == 1 && N > 1) {
        #pragma unroll
        for (int i = 0; i < N; i += 2)
            v.quad[i / 4] = (i % 4 ? v.quad[i / 4] : 0) | pack(x[i], x[i + 1], T{}) << i % 4 * 8;
    } else {
        #pragma unroll
        for (int i = 0; i < N; ++i) from_float(x[i], v.item[i]);
    }
}
// The instruction for it is there only in code for one architecture (sm_100a). NaN becomes 6.
template <int N>
__device__ __forceinline__ void pack(const float* x, Vec<fp4, N>& v) {
    #pragma unroll
    for (int i = 2 * N - 1; i >= 0; --i) {               // each is shifted in, the first one last
        unsigned int& word = v.quad[i / 8];
        const unsigned int last = i == 2 * N - 1 || i % 8 == 7 ? 0 : word;
        const unsigned int bits = nearest_bits<3, 1, 1>(fminf(fabsf(x[i]), 6.0f));
        word = (last << 1 | __float_as_uint(x[i]) >> 31) << 3 | bits >> 29;
    }
}
