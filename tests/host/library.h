// A kernel as a shared library: `run` launches it once, with the argument block at `arguments`.
#pragma once

extern "C" __attribute__((visibility("default"))) void run(const void* arguments, unsigned gx, unsigned gy, unsigned block) {
    Params params;
    static_assert(sizeof(Params) % 8 == 0);
    std::memcpy(static_cast<void*>(&params), arguments, sizeof params);
    launch<JITROPE_COLLECTIVES>({gx, gy, 1}, {block, 1, 1}, [&] { KERNEL(params); });
}
