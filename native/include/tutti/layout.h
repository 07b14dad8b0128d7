// Where every object lies: tensor stripe by arithmetic, no table of handles.
//
// A slot holds one engine block of every rank. Object i = kv_factor*layer + kv of a slot with rotation `rot` lies on
//   device (i + rot) mod N   at   data_offset[device] + ((slot*world + rank) * ceil(objects/N) + i/N) * object_bytes.
// Two objects of one slot never share a place: equal i/N on one device means equal i.
// Source: Tutti (arXiv 2605.03375), tensor-stripe layout; the rotation spreads consecutive blocks of a prompt over the
// devices.
#pragma once

#include <cstdint>
#include <vector>

namespace tutti {

struct Address {
  uint32_t device;
  uint64_t offset;  // bytes from the start of the device
};

struct Layout {
  uint32_t objects = 0;    // per block and rank: kv_factor * layers
  uint32_t kv_factor = 1;  // objects per layer
  uint32_t world = 1;      // tensor-parallel ranks that share a slot
  uint32_t rank = 0;
  uint64_t payload_bytes = 0;  // what the engine keeps per object
  uint64_t object_bytes = 0;   // payload padded to the device's logical block
  uint64_t slots = 0;
  std::vector<uint64_t> data_offset;  // one per device

  [[nodiscard]] uint32_t devices() const noexcept { return static_cast<uint32_t>(data_offset.size()); }
  [[nodiscard]] uint32_t layers() const noexcept { return objects / kv_factor; }
  [[nodiscard]] uint64_t objects_per_device() const noexcept { return (objects + devices() - 1) / devices(); }
  [[nodiscard]] Address address(uint64_t slot, uint32_t rot, uint32_t object) const noexcept {
    const uint32_t n = devices();
    const uint32_t device = (object + rot) % n;
    return {device, data_offset[device] + ((slot * world + rank) * objects_per_device() + object / n) * object_bytes};
  }
};

}  // namespace tutti
