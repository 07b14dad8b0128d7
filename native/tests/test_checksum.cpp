#include <algorithm>
#include <set>
#include <vector>

#include "check.h"
#include "tutti/checksum.h"

using tutti::multilinear64;
using tutti::multilinear64_scalar;

int main() {
  tutti::testing::Random random(1);
  std::vector<unsigned char> data(3 * 4096 + 129);
  for (auto& byte : data) {
    byte = static_cast<unsigned char>(random.next());
  }
  // Vector and scalar agree at every length around the block boundaries and at every alignment.
  for (size_t length = 0; length <= data.size() - 64; length += length < 200 ? 1 : 61) {
    const size_t shift = length % 64;
    CHECK(multilinear64(data.data() + shift, length) == multilinear64_scalar(data.data() + shift, length));
  }
  // Every single-bit flip changes the value.
  const uint64_t whole = multilinear64(data.data(), data.size());
  for (size_t bit = 0; bit < data.size() * 8; ++bit) {
    data[bit / 8] = static_cast<unsigned char>(data[bit / 8] ^ (1U << (bit % 8)));
    CHECK(multilinear64(data.data(), data.size()) != whole);
    data[bit / 8] = static_cast<unsigned char>(data[bit / 8] ^ (1U << (bit % 8)));
  }
  CHECK(multilinear64(data.data(), data.size()) == whole);
  // Exchanging two different words of a block, and two blocks, changes the value.
  for (int i = 0; i < 1000; ++i) {
    auto copy = data;
    const size_t a = 4 * random.below(1024);
    const size_t b = 4 * random.below(1024);
    if (a == b) {
      continue;
    }
    std::swap_ranges(copy.begin() + static_cast<long>(a), copy.begin() + static_cast<long>(a) + 4,
                     copy.begin() + static_cast<long>(b));
    CHECK((copy == data) == (multilinear64(copy.data(), copy.size()) == whole));
  }
  auto blocks = data;
  std::swap_ranges(blocks.begin(), blocks.begin() + 4096, blocks.begin() + 4096);
  CHECK(multilinear64(blocks.data(), blocks.size()) != whole);
  // Length counts, also of zeros.
  const std::vector<unsigned char> zeros(8192, 0);
  std::set<uint64_t> values;
  for (size_t length = 0; length <= zeros.size(); length += 512) {
    values.insert(multilinear64(zeros.data(), length));
  }
  CHECK(values.size() == 17);
  // Multipliers are distinct: the guarantee for exchanged words rests on it.
  const auto table = tutti::checksum_multipliers();
  CHECK(std::set<uint32_t>(table.begin(), table.end()).size() == table.size());
  // The sum may be split over lanes in any way: lane l takes words l, l+32, ..., as a GPU warp would.
  uint64_t total = 0;
  for (size_t lane = 0; lane < 32; ++lane) {
    uint64_t sum = 0;
    for (size_t block = 0; block < 2; ++block) {
      uint64_t part = 0;
      for (size_t j = lane; j < 1024; j += 32) {
        uint32_t word = 0;
        std::copy_n(data.data() + block * 4096 + 4 * j, 4, reinterpret_cast<unsigned char*>(&word));
        part += static_cast<uint64_t>(word) * table[j];
      }
      sum = sum * tutti::kChecksumRadix + part;
    }
    total += sum;
  }
  CHECK(tutti::checksum_mix(total + 8192 * tutti::kChecksumLength) == multilinear64(data.data(), 8192));
  return 0;
}
