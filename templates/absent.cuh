// A stage that a kernel has not: it leaves a head as it is.
struct Absent {
    static constexpr bool WHOLE = false;                 // threads need not exchange elements

    Absent() = default;
    template <typename... Any> DEVICE Absent(const Any&...) {}
    template <typename... Any> DEVICE void load(const Any&...) const {}
    template <typename... Any> DEVICE void values(const Any&...) const {}
    template <typename... Any> DEVICE void load_late(const Any&...) const {}
    template <typename... Any> DEVICE void sum(const Any&...) const {}
    template <typename... Any> DEVICE void apply(const Any&...) const {}
    template <typename... Any> DEVICE void back(const Any&...) const {}
    template <typename... Any> DEVICE void finish(const Any&...) const {}
};

// A norm that a kernel has not (then it is `Norm`): x is a head as it is read.
struct AbsentNorm : Absent {
    using Absent::Absent;
    template <typename Any, typename Own, typename Read, typename X>
    DEVICE void apply(const Any&, const Own& own, const Read& read, X& x) const { read(own, x); }
};
