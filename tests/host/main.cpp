// Launches a kernel, the library at argv[1], on memory read from the file at argv[2], and writes the memory back.
//
// The file: int64 words: grid x, y, z; block; R regions; each region's bytes; W parameter words, each a pair (region or
// -1, value): the region's address plus value bytes, or the value itself. Then the regions' contents. Each region is an
// separate allocation, poisoned from its end on: ASan detects any byte read or written past it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <sanitizer/asan_interface.h>
#include <vector>

static std::int64_t read_word(std::FILE* file) {
    std::int64_t word;
    if (std::fread(&word, 8, 1, file) != 1) std::abort();
    return word;
}

int main(int, char** argv) {
    void* library = dlopen(argv[1], RTLD_NOW);
    std::FILE* file = std::fopen(argv[2], "rb");
    if (!library || !file) return std::fprintf(stderr, "%s\n", library ? argv[2] : dlerror()), 2;
    using Run = void (*)(const void*, unsigned, unsigned, unsigned, unsigned);
    const auto run = reinterpret_cast<Run>(dlsym(library, "run"));
    const auto takes = reinterpret_cast<std::size_t (*)()>(dlsym(library, "parameter_bytes"))();
    const auto gx = read_word(file), gy = read_word(file), gz = read_word(file), block = read_word(file);
    std::vector<std::int64_t> sizes(read_word(file));
    for (auto& size : sizes) size = read_word(file);
    std::vector<std::int64_t> words(read_word(file)), owners(words.size());
    for (std::size_t i = 0; i < words.size(); ++i) {
        owners[i] = read_word(file);
        words[i] = read_word(file);
    }
    std::vector<char*> regions;
    for (const auto size : sizes) {
        regions.push_back(static_cast<char*>(std::aligned_alloc(256, (size + 255) / 256 * 256)));
        if (size && std::fread(regions.back(), 1, size, file) != static_cast<std::size_t>(size)) return 3;
        __asan_poison_memory_region(regions.back() + size, (size + 255) / 256 * 256 - size);
    }
    std::fclose(file);
    for (std::size_t i = 0; i < words.size(); ++i)
        if (owners[i] >= 0) words[i] += reinterpret_cast<std::int64_t>(regions[owners[i]]);
    if (words.size() * 8 != takes) {
        std::fprintf(stderr, "%zu parameter words, the kernel takes %zu\n", words.size(), takes / 8);
        return 4;
    }
    run(words.data(), gx, gy, gz, block);
    file = std::fopen(argv[2], "wb");
    for (std::size_t r = 0; r < regions.size(); ++r) {
        if (sizes[r]) std::fwrite(regions[r], 1, sizes[r], file);
        __asan_unpoison_memory_region(regions[r], (sizes[r] + 255) / 256 * 256);
        std::free(regions[r]);
    }
    std::fclose(file);
    return 0;
}
