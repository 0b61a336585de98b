// scale: q is multiplied by the number of its token; with DTYPE it is rounded first, as the host's tensor is.
struct Scale {
    float factor;

    DEVICE Scale(const Params& p, const Place& place) {
        const float* found = p.q_factor + p.factor_stride.token.step(place.token);
        if constexpr (!ONE_ROW) found += p.factor_stride.batch.step(place.batch);
        factor = *found;
    }
    DEVICE void apply(const Head& head, Elements& y) const {
        for (int i = 0; i < ELEMENTS && head.is_q; ++i)
            y[i] = __fmul_rn(ROUNDING == DTYPE ? rounded(y[i]) : y[i], factor);
    }
    // Of the output's gradient. Without a branch it takes fewer registers.
    DEVICE void back(const Head& head, Elements& g) const {
        const float own = head.is_q ? factor : 1.0f;
        for (int i = 0; i < ELEMENTS; ++i) g[i] = __fmul_rn(g[i], own);
    }
};
