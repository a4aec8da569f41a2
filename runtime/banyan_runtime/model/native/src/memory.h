// Memory that comes from the kernel and goes back there: in huge pages where weights are streamed, page by page where little of it
// may ever be written. The process says that there is none by std::bad_alloc.
#pragma once

#include <cstddef>
#include <new>
#include <utility>

#include <sys/mman.h>

enum class Pages { huge, small };

template <class T>
class Block {
  public:
    Block() = default;
    Block(size_t count, Pages pages) : size(count) {
        constexpr size_t large = size_t(2) << 20;
        if (!count) return;
        bytes = count * sizeof(T) + (pages == Pages::huge ? large : 0);
        base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) throw std::bad_alloc();
        size_t address = reinterpret_cast<size_t>(base);
        if (pages == Pages::huge) address = (address + large - 1) / large * large;
        values = reinterpret_cast<T *>(address);
        madvise(values, count * sizeof(T), pages == Pages::huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    }
    Block(Block &&other) noexcept { *this = std::move(other); }
    Block &operator=(Block &&other) noexcept {
        std::swap(base, other.base);
        std::swap(bytes, other.bytes);
        std::swap(values, other.values);
        std::swap(size, other.size);
        return *this;
    }
    ~Block() {
        if (bytes) munmap(base, bytes);
    }

    T *get() const { return values; }
    T &operator[](size_t i) const { return values[i]; }
    size_t count() const { return size; }

  private:
    void *base = nullptr;
    size_t bytes = 0, size = 0;
    T *values = nullptr;
};
