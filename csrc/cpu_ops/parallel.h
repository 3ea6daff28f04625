// Splits work over torch's own OpenMP threads, without linking OpenMP.
//
// torch carries a private libgomp. A second pool of threads would fight its spinning workers for the
// cores, so Python hands over the address of GOMP_parallel in the library that torch has loaded.
// Without it (another OpenMP runtime, another platform) work runs in the calling thread.
#pragma once

#include <cstdint>

namespace cpu_ops {

using GompParallel = void (*)(void (*)(void *), void *, unsigned, unsigned);

inline GompParallel &gomp_parallel() {
    static GompParallel pointer = nullptr;
    return pointer;
}

// MKL_Set_Num_Threads_Local, where torch's BLAS is MKL. Which of its kernels a product takes, and so
// how it rounds, depends on the number of threads that MKL believes it has, even inside a parallel
// region where it never uses them. One thread for everybody makes results independent of who
// computes what.
using SetBlasThreads = int (*)(int);

inline SetBlasThreads &set_blas_threads() {
    static SetBlasThreads pointer = nullptr;
    return pointer;
}

class OneBlasThread {
  public:
    OneBlasThread() {
        if (set_blas_threads() != nullptr) before_ = set_blas_threads()(1);
    }
    ~OneBlasThread() {
        if (set_blas_threads() != nullptr) set_blas_threads()(before_);
    }
    OneBlasThread(const OneBlasThread &) = delete;
    OneBlasThread &operator=(const OneBlasThread &) = delete;

  private:
    int before_ = 0;
};

// Runs body(block) for block = 0 .. blocks-1 on at most `threads` threads. What a block computes does
// not depend on who computes it: results are the same for any number of threads.
template <class Body> void parallel_blocks(std::int64_t blocks, int threads, const Body &body) {
    struct Shared {
        const Body *body;
        std::int64_t blocks;
        std::int64_t next;
    } shared{&body, blocks, 0};
    auto work = [](void *data) {
        const OneBlasThread guard;
        auto *s = static_cast<Shared *>(data);
        while (true) {
            const std::int64_t block = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
            if (block >= s->blocks) return;
            (*s->body)(block);
        }
    };
    if (threads <= 1 || blocks <= 1 || gomp_parallel() == nullptr)
        work(&shared);
    else
        gomp_parallel()(+work, &shared, static_cast<unsigned>(threads), 0);
}

} // namespace cpu_ops
