// What lets one source serve CPU and GPU: the function marker, and words that both sides read and write.
//
// Every word that CPU and GPU share has one writer at a time: PCIe carries no atomic operations that both sides could
// rely on. The functions without prefix are for those; gpu_* ones for words in a GPU's memory that its warps share, and
// block_* ones for words that the warps of one thread block share. On the host, threads take the place of warps.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TUTTI_HD __host__ __device__
#else
#define TUTTI_HD
#endif

namespace tutti {

#if defined(__CUDA_ARCH__)

TUTTI_HD inline uint32_t load_acquire(const uint32_t* word) noexcept {
  uint32_t value = 0;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
TUTTI_HD inline uint32_t load_relaxed(const uint32_t* word) noexcept {
  uint32_t value = 0;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
TUTTI_HD inline void store_release(uint32_t* word, uint32_t value) noexcept {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
TUTTI_HD inline void store_relaxed(uint32_t* word, uint32_t value) noexcept {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
// Makes this thread's earlier writes visible to CPU and devices before its later ones, and later reads see at least
// what earlier ones saw.
TUTTI_HD inline void fence_system() noexcept { asm volatile("fence.sc.sys;" ::: "memory"); }

TUTTI_HD inline uint32_t gpu_fetch_add(uint32_t* word, uint32_t value) noexcept {
  uint32_t before = 0;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}
TUTTI_HD inline uint32_t gpu_load(const uint32_t* word) noexcept {
  uint32_t value = 0;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
TUTTI_HD inline uint64_t gpu_load(const uint64_t* word) noexcept {
  uint64_t value = 0;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
TUTTI_HD inline bool gpu_compare_exchange(uint64_t* word, uint64_t expected, uint64_t desired) noexcept {
  uint64_t before = 0;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(word), "l"(expected), "l"(desired)
               : "memory");
  return before == expected;
}
TUTTI_HD inline bool gpu_compare_exchange(uint32_t* word, uint32_t expected, uint32_t desired) noexcept {
  uint32_t before = 0;
  asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(word), "r"(expected), "r"(desired)
               : "memory");
  return before == expected;
}

TUTTI_HD inline uint32_t block_load(const uint32_t* word) noexcept {
  uint32_t value = 0;
  asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
TUTTI_HD inline void block_store(uint32_t* word, uint32_t value) noexcept {
  asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
TUTTI_HD inline uint32_t block_fetch_add(uint32_t* word, uint32_t value) noexcept {
  uint32_t before = 0;
  asm volatile("atom.acq_rel.cta.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}
TUTTI_HD inline uint64_t block_fetch_add(uint64_t* word, uint64_t value) noexcept {
  uint64_t before = 0;
  asm volatile("atom.acq_rel.cta.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
  return before;
}

#else

inline uint32_t load_acquire(const uint32_t* word) noexcept { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline uint32_t load_relaxed(const uint32_t* word) noexcept { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline void store_release(uint32_t* word, uint32_t value) noexcept { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
inline void store_relaxed(uint32_t* word, uint32_t value) noexcept { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
#if defined(__SANITIZE_THREAD__)  // which knows no fences
inline uint32_t fence_word = 0;
inline void fence_system() noexcept { __atomic_fetch_add(&fence_word, 0U, __ATOMIC_SEQ_CST); }
#else
inline void fence_system() noexcept { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif

inline uint32_t gpu_fetch_add(uint32_t* word, uint32_t value) noexcept {
  return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
}
inline uint32_t gpu_load(const uint32_t* word) noexcept { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline uint64_t gpu_load(const uint64_t* word) noexcept { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline uint32_t block_load(const uint32_t* word) noexcept { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void block_store(uint32_t* word, uint32_t value) noexcept { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
inline uint32_t block_fetch_add(uint32_t* word, uint32_t value) noexcept {
  return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
}
inline uint64_t block_fetch_add(uint64_t* word, uint64_t value) noexcept {
  return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
}
template <typename Word>
bool gpu_compare_exchange(Word* word, Word expected, Word desired) noexcept {
  return __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

#endif

}  // namespace tutti
