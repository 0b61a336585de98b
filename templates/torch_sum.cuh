// The sum of a row's squares in torch's order, so that the bits are equal.
//
// In torch, a thread sums leaves of neighbouring squares. Then leaves whose numbers differ in one bit are added, one
// bit after the other. The bits of a leaf's number are, from the lowest: the leaf in the lane's chunk, the lane, the
// chunk, and the head (among the heads of a row that are processed together). Of partly rotated heads (ALIKE) the bits
// of a lane beyond the ROTARY_LANES follow the chunk.
//   ONCE, NONE   torch's rms_norm: 128 threads a row, each with four elements at a time. Leaves have four squares. The
//                32 leaves of a warp are added first, from bit 4 down to bit 0; then the four warps, bits 6 and 5.
//   TWICE        torch's mean: a warp a row. Leaves have four squares, and with 256 elements those of both chunks are
//                added first. With fewer than 128 elements a leaf is one square, and with 64 both chunks are added
//                first. Then bits 4 to 0.
//
// An example: heads of 128 with ONCE, accesses of 8 elements, so 8 lanes with two chunks of 8. Element e is in leaf
// e / 4, a number from 0 to 31 with five bits:
//
//     bit      4        3  2  1     0
//     means    chunk    lane        leaf in the chunk
//
//   1. A lane sums four squares for each of its leaves, leaf[chunk][0] and leaf[chunk][1].
//   2. Bit 4: it adds its second chunk's leaves to its first chunk's: elements e and e + 64.
//   3. Bits 3, 2, 1: it adds the leaves of lane ^ 4, of lane ^ 2, of lane ^ 1: elements e and e + 32, e + 16, e + 8.
//   4. Bit 0: it adds its second leaf to its first one: elements e and e + 4.

constexpr bool CHUNKS_FIRST = NORM_ROUNDING == TWICE && (HEAD_DIM == 64 || HEAD_DIM == 256);
constexpr int LEAF = NORM_ROUNDING == TWICE && HEAD_DIM < 128 ? 1 : 4;      // squares of a leaf
constexpr int LEAVES = CHUNK / LEAF ? CHUNK / LEAF : 1;  // leaves of a chunk
__device__ constexpr int bits_of(int n) { return n < 2 ? 0 : 1 + bits_of(n / 2); }
constexpr int LANE_BIT = bits_of(LEAVES);                // the lowest bit of the lane
constexpr int CHUNK_BIT = LANE_BIT + bits_of(ROTARY_LANES);
constexpr int HEAD_BIT = CHUNK_BIT + 1 + bits_of(TEAM / ROTARY_LANES);      // the lowest bit of the head
constexpr int TOP_BIT = ACROSS_HEADS ? HEAD_BIT + bits_of(HEADS_PER_BLOCK) : HEAD_BIT;     // bits of a number
// Whether the lanes of a row can sum in torch's order; if not, they sum in the simplest order.
constexpr bool AS_TORCH = (COPY_LANES == 0 || (ALIKE && !CHUNKS_FIRST)) && CHUNKS == 2 && TEAM == LANES && CHUNK >= 4
    && (ROTARY_LANES & (ROTARY_LANES - 1)) == 0 && ROW_THREADS <= 32
    && (ACROSS_HEADS ? NORM_ROUNDING != TWICE && TOP_BIT == 7 : TOP_BIT <= 6);

// A lane's sums of squares, then the sums of its rows.
struct Squares {
    float leaf[ROWS][CHUNKS][LEAVES] = {};

    DEVICE void add(int row, const float* x) {
        float (&sums)[CHUNKS][LEAVES] = leaf[row];
        if constexpr (!AS_TORCH) {
            for (int i = 0; i < ELEMENTS; ++i) sums[0][0] = __fmaf_rn(x[i], x[i], sums[0][0]);
        } else if constexpr (CHUNKS_FIRST) {
            for (int i = 0; i < CHUNK; ++i) {
                const float other = x[CHUNK + i], both = __fadd_rn(__fmul_rn(x[i], x[i]), __fmul_rn(other, other));
                sums[0][i / LEAF] = i % LEAF ? __fadd_rn(sums[0][i / LEAF], both) : both;
            }
        } else {
            for (int i = 0; i < 2 * CHUNK; ++i) {
                float& sum = sums[i / CHUNK][i % CHUNK / LEAF];
                sum = NORM_ROUNDING == TWICE ? __fadd_rn(sum, __fmul_rn(x[i], x[i])) : __fmaf_rn(x[i], x[i], sum);
            }
        }
    }

    // Computes the sums of the rows in every thread of a row.
    DEVICE void of_rows(float (&sum)[ROWS]) {
        if constexpr (AS_TORCH) {
            int chunks = CHUNKS_FIRST ? 1 : 2, leaves = LEAVES;     // not yet added up
            #pragma unroll
            for (int n = 0; n < 7; ++n) {
                const int bit = n < 5 ? 4 - n : 11 - n;  // 4 3 2 1 0, then 6 5
                if (bit >= TOP_BIT || (CHUNKS_FIRST && bit == CHUNK_BIT)) continue;
                if (bit == CHUNK_BIT) chunks = 1;
                if (bit < LANE_BIT) leaves = 1 << bit;
                add_across(bit, chunks, leaves);
            }
        }
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r] = leaf[r][0][0];
        if constexpr (!AS_TORCH) row_sum(sum);
    }

    // Adds to each leaf the leaf whose number differs in `bit`. That leaf is in the lane's other chunk, in the same
    // chunk, or in the thread `step` lanes away.
    DEVICE void add_across(int bit, int chunks, int leaves) {
        const int step = bit < LANE_BIT || bit == CHUNK_BIT ? 0
            : bit < CHUNK_BIT ? 1 << (bit - LANE_BIT)
            : bit < HEAD_BIT ? ROTARY_LANES << (bit - CHUNK_BIT - 1) : TEAM << (bit - HEAD_BIT);
        #pragma unroll
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < chunks; ++c)
                for (int i = 0; i < leaves; ++i) {
                    const float other = bit == CHUNK_BIT ? leaf[r][1][i]
                        : bit < LANE_BIT ? leaf[r][c][i + leaves] : __shfl_xor_sync(~0u, leaf[r][c][i], step);
                    leaf[r][c][i] = __fadd_rn(leaf[r][c][i], other);
                }
    }
};
