#include <algorithm>
#include <set>
#include <utility>

#include "check.h"
#include "tutti/layout.h"

using tutti::Layout;

int main() {
  // No two objects of any slot, rank or rotation share a place, and none leaves its device's region.
  for (uint32_t devices = 1; devices <= 5; ++devices) {
    for (const uint32_t objects : {1U, 4U, 7U, 60U}) {
      std::set<std::pair<uint32_t, uint64_t>> places;
      const uint64_t slots = 5;
      for (uint32_t rank = 0; rank < 2; ++rank) {
        Layout layout{objects, 1, 2, rank, 500, 512, slots, std::vector<uint64_t>(devices, 4096)};
        const uint64_t end = 4096 + slots * 2 * layout.objects_per_device() * 512;
        for (uint64_t slot = 0; slot < slots; ++slot) {
          const auto rot = static_cast<uint32_t>(slot % devices);
          for (uint32_t object = 0; object < objects; ++object) {
            const auto address = layout.address(slot, rot, object);
            CHECK(address.device < devices && address.offset >= 4096 && address.offset + 512 <= end);
            CHECK(places.emplace(address.device, address.offset).second);
          }
        }
      }
    }
  }
  // Balance over consecutive blocks: at most 2 objects between the fullest and the emptiest device per layer, 5 % from
  // 20N blocks.
  for (uint32_t devices = 1; devices <= 8; ++devices) {
    for (const uint32_t kv_factor : {1U, 2U}) {
      Layout layout{32 * kv_factor, kv_factor, 1, 0, 512, 512, 1000, std::vector<uint64_t>(devices, 0)};
      for (uint32_t blocks = 1; blocks <= 20 * devices; ++blocks) {
        std::vector<uint32_t> count(devices, 0);
        for (uint32_t block = 0; block < blocks; ++block) {
          for (uint32_t kv = 0; kv < kv_factor; ++kv) {
            ++count[layout.address(block, block % devices, 3 * kv_factor + kv).device];
          }
        }
        const auto [least, most] = std::minmax_element(count.begin(), count.end());
        CHECK(*most - *least <= 2);
        if (blocks == 20 * devices) {
          CHECK(*most * devices * 100 <= blocks * kv_factor * 105);
        }
      }
    }
  }
  // Llama-3-8B, bf16, T = 64: 256 KiB packed objects, 128 K tokens = 65,536 of them = 16 GiB.
  const uint64_t object = 64ULL * 8 * 128 * 2 * 2;
  CHECK(object == 256 * 1024);
  CHECK(131072 / 64 * 32 == 65536 && 65536 * object == 16ULL << 30);
  return 0;
}
