// Formats of 8 and 4 bits, of elements and of their scales.
struct fp8 { unsigned char bits; };                                 // e4m3: no infinity, at most 448
struct fp8_e5m2 { unsigned char bits; };                            // at most 57344; infinities are not stored
struct e8m0 { unsigned char bits; };                                // a power of two from 2^-127 on; 255 is NaN
struct e8m0_fp32 { float value; };                                  // the same power of two
struct int8 { signed char value; };                                 // at most 127 in size
struct fp4 { unsigned char bits; };                                 // two of e2m1, at most 6: the first in the low bits
template <> constexpr int PER_ITEM<fp4> = 2;

// The bits of the nearest number (to even) with MANTISSA bits behind the point, without the sign: the WIDTH highest
// bits of the result. size: at most the largest such number. The sum of size and a large power of two ends with the
// number of steps that size is long, a step being the distance of the numbers there. Its exponent gives the count of
// the numbers below, to which BEGIN is added.
template <int WIDTH, int MANTISSA, int BIAS>
DEVICE unsigned int nearest_bits(float size) {
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
DEVICE unsigned char float_to_byte(float value, float most) {
    const unsigned int bits = nearest_bits<7, MANTISSA, BIAS>(fminf(fabsf(value), most));
    return value != value ? 0x7f : ((__float_as_uint(value) & 0x80000000u) | bits >> 1) >> 24;
}
DEVICE unsigned char float_to_fp8(float value) { return float_to_byte<3, 7>(value, 448.0f); }
DEVICE unsigned char float_to_fp8_e5m2(float value) {
    return float_to_byte<2, 15>(value, 57344.0f);
}

DEVICE unsigned int pack(float first, float second, fp8) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(second), "f"(first));
    return two;
#else
    return float_to_fp8(first) | static_cast<unsigned int>(float_to_fp8(second)) << 8;
#endif
}

DEVICE unsigned int pack(float first, float second, fp8_e5m2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short two;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(two) : "f"(second), "f"(first));
    return two;
#else
    return float_to_fp8_e5m2(first) | static_cast<unsigned int>(float_to_fp8_e5m2(second)) << 8;
#endif
}

// NaN becomes 127.
DEVICE unsigned int float_to_int8(float value) {
    return static_cast<unsigned char>(static_cast<signed char>(rintf(fmaxf(fminf(value, 127.0f), -127.0f))));
}
DEVICE unsigned int pack(float first, float second, int8) {
    return float_to_int8(first) | float_to_int8(second) << 8;
}

DEVICE void from_float(float value, fp8& x) { x.bits = float_to_fp8(value); }
DEVICE void from_float(float value, fp8_e5m2& x) { x.bits = float_to_fp8_e5m2(value); }
DEVICE void from_float(float value, int8& x) { x.value = float_to_int8(value); }

// A size, rounded up to a power of two.
DEVICE void from_float(float value, e8m0& x) {
    const unsigned int bits = __float_as_uint(value);
    x.bits = bits > 0x7f800000u ? 255 : bits <= 0x400000u ? 0 : min((bits + 0x7fffffu) >> 23, 254u);
}
DEVICE float to_float(fp8 x) {                  // of a size; 2^120, because exponents begin there
    if (x.bits == 0x7fu) return __uint_as_float(0x7fc00000u);
    return __fmul_rn(__uint_as_float(static_cast<unsigned int>(x.bits) << 20), __uint_as_float(247u << 23));
}
DEVICE float to_float(e8m0 x) {
    const unsigned int bits = x.bits;
    return __uint_as_float(bits == 0 ? 0x400000u : bits == 255 ? 0x7fc00000u : bits << 23);
}
DEVICE void from_float(float value, e8m0_fp32& x) {
    e8m0 power;
    from_float(value, power);
    x.value = to_float(power);
}
DEVICE float to_float(e8m0_fp32 x) { return x.value; }

// The instruction for it is there only in code for one architecture (sm_100a). NaN becomes 6.
template <int N>
DEVICE void pack(const float* x, Vec<fp4, N>& v) {
    #pragma unroll
    for (int i = 2 * N - 1; i >= 0; --i) {               // each is shifted in, the first one last
        unsigned int& word = v.quad[i / 8];
        const unsigned int last = i == 2 * N - 1 || i % 8 == 7 ? 0 : word;
        const unsigned int bits = nearest_bits<3, 1, 1>(fminf(fabsf(x[i]), 6.0f));
        word = (last << 1 | __float_as_uint(x[i]) >> 31) << 3 | bits >> 29;
    }
}
