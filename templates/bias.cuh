// bias: a projection's bias is added to a lane's part of a head as it was read, and the sums are rounded to T; or it is
// added to sums in fp32.
struct Bias {
    // To an access, `dims` dims from the lane's first one.
    static DEVICE void add(const Lane<const T>& bias, int dims, float* sum) {
        float own[VEC];
        unpack(load_kept<T, VEC>(bias[dims]), own);
        for (int i = 0; i < VEC; ++i) sum[i] = __fadd_rn(sum[i], own[i]);
    }
    static DEVICE void apply(const Params& p, const Head& head, int dim, bool rotary, int accesses, Chunks& chunks) {
        const Lane<const T> bias = head.in(head.of(p.added), p.added_stride, {}, dim);
        for (int n = 0; n < ACCESSES; ++n) {
            if (n >= accesses) continue;
            float sum[VEC];
            unpack(chunks.x[n], sum);
            add(bias, dims_to(n, INTERLEAVED, rotary), sum);
            pack(sum, chunks.x[n]);
        }
    }
    static DEVICE void apply(const Params& p, const Head& head, int dim, Elements& sums) {
        const Lane<const T> bias = head.in(head.of(p.added), p.added_stride, {}, dim);
        for (int n = 0; n < ACCESSES; ++n) add(bias, dims_to(n, INTERLEAVED), sums + n * VEC);
    }
};
