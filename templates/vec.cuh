// Aligned vector accesses, and conversion between storage types and fp32. bf16 and fp16 are stored as 16 bits, and the
// conversions are single instructions, so no CUDA header is needed, which would double the compile time.

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

template <typename T> constexpr int PER_ITEM = 1;                   // elements in an item

#if defined(__CUDA_ARCH__)
DEVICE float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
DEVICE unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

DEVICE unsigned short float_to_bfloat(float value) {     // to nearest even
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

// Two neighbouring elements, the first in the low half: one register, one instruction.
DEVICE unsigned int pack(float first, float second, fp16) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned int word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
#else
    return float_to_half(first) | static_cast<unsigned int>(float_to_half(second)) << 16;
#endif
}
DEVICE unsigned int pack(float first, float second, bf16) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned int word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
#else
    return float_to_bfloat(first) | static_cast<unsigned int>(float_to_bfloat(second)) << 16;
#endif
}

DEVICE float to_float(float x) { return x; }
DEVICE double to_float(double x) { return x; }              // for fp64 tables
DEVICE float to_float(fp16 x) { return half_to_float(x.bits); }
DEVICE float to_float(bf16 x) {
    return __uint_as_float(static_cast<unsigned int>(x.bits) << 16);
}

DEVICE void from_float(float value, float& x) { x = value; }
DEVICE void from_float(float value, fp16& x) { x.bits = float_to_half(value); }
DEVICE void from_float(float value, bf16& x) { x.bits = float_to_bfloat(value); }

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
DEVICE Vec<T, N> load(const T* address) {
    Vec<T, N> v;
    v.word = *reinterpret_cast<const typename Word<sizeof(T) * N>::type*>(address);
    return v;
}

template <typename T, int N>
DEVICE void store(T* address, const Vec<T, N>& v) {
    *reinterpret_cast<typename Word<sizeof(T) * N>::type*>(address) = v.word;
}

// The same, always in one instruction: after a branch NVRTC 13.5 splits the plain store.
template <typename T, int N>
DEVICE void store_whole(T* address, const Vec<T, N>& v) {
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
DEVICE Vec<T, N> load_global(const T* address) {
#if defined(__CUDA_ARCH__)
    __builtin_assume(__isGlobal(address));
#endif
    return load<T, N>(address);
}

// The same for data that other blocks and later launches read again: evicted last from L2. Volatile: otherwise
// NVRTC treats the load as arithmetic and moves it ahead of its condition.
template <typename T, int N>
DEVICE Vec<T, N> load_kept(const T* address) {
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
DEVICE Vec<T, N> load_once(const T* address) {
    Vec<T, N> v;
    v.word = __ldcs(reinterpret_cast<const typename Word<sizeof(T) * N>::type*>(address));
    return v;
}

template <typename T, int N, typename Real>
DEVICE void unpack(const Vec<T, N>& v, Real* out) {
    for (int i = 0; i < N; ++i) out[i] = static_cast<Real>(to_float(v.item[i]));
}
template <int N>
DEVICE void unpack(const Vec<bf16, N>& v, float* out) {     // one instruction each
    if constexpr (N == 1) {
        out[0] = to_float(v.item[0]);
    } else {
        for (int i = 0; i < N; ++i)
            out[i] = __uint_as_float(i % 2 ? v.quad[i / 2] & 0xffff0000u : v.quad[i / 2] << 16);
    }
}

// Two neighbouring elements as they come back from a store.
template <typename T>
DEVICE void round_pair(float& first, float& second, T type) {
    const unsigned int word = pack(first, second, type);
    first = half_to_float(word & 0xffffu), second = half_to_float(word >> 16);
}
DEVICE void round_pair(float& first, float& second, bf16 type) {
    const unsigned int word = pack(first, second, type);
    first = __uint_as_float(word << 16), second = __uint_as_float(word & 0xffff0000u);
}
DEVICE void round_pair(float&, float&, float) {}

template <typename T, int N>
DEVICE void pack(const float* x, Vec<T, N>& v) {
    if constexpr (sizeof(T) == 2 && N > 1) {
        for (int i = 0; i < N; i += 2) v.quad[i / 2] = pack(x[i], x[i + 1], T{});
    } else if constexpr (sizeof(T) == 1 && N > 1) {
        for (int i = 0; i < N; i += 2)
            v.quad[i / 4] = (i % 4 ? v.quad[i / 4] : 0) | pack(x[i], x[i + 1], T{}) << i % 4 * 8;
    } else {
        for (int i = 0; i < N; ++i) from_float(x[i], v.item[i]);
    }
}
