// A stage that a kernel has not: it leaves a head as it is.
struct Absent {
    static constexpr bool WHOLE = false;                 // threads need not exchange elements

    Absent() = default;
    template <typename... Any> __device__ __forceinline__ Absent(const Any&...) {}
    template <typename... Any> __device__ __forceinline__ void load(const Any&...) const {}
    template <typename... Any> __device__ __forceinline__ void load_late(const Any&...) const {}
    template <typename... Any> __device__ __forceinline__ void sum(const Any&...) const {}
    template <typename... Any> __device__ __forceinline__ void apply(const Any&...) const {}
    template <typename... Any> __device__ __forceinline__ void back(const Any&...) const {}
};
