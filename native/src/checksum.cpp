#include "tutti/checksum.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace tutti {
namespace {

alignas(64) constexpr std::array<uint32_t, kChecksumBlockWords> kMultipliers = checksum_multipliers();

using BlockSum = uint64_t (*)(const unsigned char*) noexcept;  // sum of one whole block

// Sum over the first `bytes` (at most one block) of a block.
uint64_t partial_block(const unsigned char* data, size_t bytes) noexcept {
  uint64_t sum = 0;
  const size_t whole = bytes / 4;
  for (size_t j = 0; j < whole; ++j) {
    uint32_t word = 0;
    std::memcpy(&word, data + 4 * j, 4);
    sum += static_cast<uint64_t>(word) * kMultipliers[j];
  }
  if (const size_t rest = bytes % 4; rest != 0) {
    uint32_t word = 0;
    std::memcpy(&word, data + 4 * whole, rest);
    sum += static_cast<uint64_t>(word) * kMultipliers[whole];
  }
  return sum;
}

uint64_t block_scalar(const unsigned char* data) noexcept { return partial_block(data, kChecksumBlockBytes); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) uint64_t block_avx2(const unsigned char* data) noexcept {
  __m256i even = _mm256_setzero_si256();
  __m256i odd = _mm256_setzero_si256();
  const auto* multipliers = reinterpret_cast<const unsigned char*>(kMultipliers.data());
  for (size_t at = 0; at < kChecksumBlockBytes; at += 32) {
    const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + at));
    const __m256i m = _mm256_load_si256(reinterpret_cast<const __m256i*>(multipliers + at));
    even = _mm256_add_epi64(even, _mm256_mul_epu32(d, m));
    odd = _mm256_add_epi64(odd, _mm256_mul_epu32(_mm256_srli_epi64(d, 32), _mm256_srli_epi64(m, 32)));
  }
  alignas(32) std::array<uint64_t, 4> lanes{};
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.data()), _mm256_add_epi64(even, odd));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

__attribute__((target("avx512f"))) uint64_t block_avx512(const unsigned char* data) noexcept {
  __m512i even = _mm512_setzero_si512();
  __m512i odd = _mm512_setzero_si512();
  __m512i even2 = _mm512_setzero_si512();
  __m512i odd2 = _mm512_setzero_si512();
  const auto* multipliers = reinterpret_cast<const unsigned char*>(kMultipliers.data());
  for (size_t at = 0; at < kChecksumBlockBytes; at += 128) {
    const __m512i d = _mm512_loadu_si512(data + at);
    const __m512i m = _mm512_load_si512(multipliers + at);
    const __m512i d2 = _mm512_loadu_si512(data + at + 64);
    const __m512i m2 = _mm512_load_si512(multipliers + at + 64);
    even = _mm512_add_epi64(even, _mm512_mul_epu32(d, m));
    odd = _mm512_add_epi64(odd, _mm512_mul_epu32(_mm512_srli_epi64(d, 32), _mm512_srli_epi64(m, 32)));
    even2 = _mm512_add_epi64(even2, _mm512_mul_epu32(d2, m2));
    odd2 = _mm512_add_epi64(odd2, _mm512_mul_epu32(_mm512_srli_epi64(d2, 32), _mm512_srli_epi64(m2, 32)));
  }
  alignas(64) std::array<uint64_t, 8> lanes{};
  _mm512_store_si512(lanes.data(), _mm512_add_epi64(_mm512_add_epi64(even, odd), _mm512_add_epi64(even2, odd2)));
  uint64_t sum = 0;
  for (const uint64_t lane : lanes) {
    sum += lane;
  }
  return sum;
}
#elif defined(__aarch64__)
uint64_t block_neon(const unsigned char* data) noexcept {
  uint64x2_t low = vdupq_n_u64(0);
  uint64x2_t high = vdupq_n_u64(0);
  for (size_t j = 0; j < kChecksumBlockWords; j += 4) {
    const uint32x4_t d = vreinterpretq_u32_u8(vld1q_u8(data + 4 * j));
    const uint32x4_t m = vld1q_u32(kMultipliers.data() + j);
    low = vmlal_u32(low, vget_low_u32(d), vget_low_u32(m));
    high = vmlal_high_u32(high, d, m);
  }
  return vaddvq_u64(vaddq_u64(low, high));
}
#endif

struct Variant {
  BlockSum block;
  const char* name;
};

Variant choose_variant() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    return {block_avx512, "avx512"};
  }
  if (__builtin_cpu_supports("avx2")) {
    return {block_avx2, "avx2"};
  }
#elif defined(__aarch64__)
  return {block_neon, "neon"};
#endif
  return {block_scalar, "scalar"};
}

const Variant kVariant = choose_variant();

uint64_t checksum_with(BlockSum block, const void* data, size_t bytes) noexcept {
  const auto* at = static_cast<const unsigned char*>(data);
  uint64_t total = 0;
  size_t left = bytes;
  for (; left >= kChecksumBlockBytes; left -= kChecksumBlockBytes, at += kChecksumBlockBytes) {
    total = total * kChecksumRadix + block(at);
  }
  if (left != 0) {
    total = total * kChecksumRadix + partial_block(at, left);
  }
  return checksum_mix(total + static_cast<uint64_t>(bytes) * kChecksumLength);
}

}  // namespace

uint64_t multilinear64(const void* data, size_t bytes) noexcept { return checksum_with(kVariant.block, data, bytes); }

uint64_t multilinear64_scalar(const void* data, size_t bytes) noexcept {
  return checksum_with(block_scalar, data, bytes);
}

uint64_t checksum_block_sum(const void* data, size_t bytes) noexcept {
  const auto* at = static_cast<const unsigned char*>(data);
  return bytes == kChecksumBlockBytes ? kVariant.block(at) : partial_block(at, bytes);
}

const char* checksum_variant() noexcept { return kVariant.name; }

}  // namespace tutti
