// NumPy arrays in and out of native code. Inputs are borrowed for the call; outputs own their memory.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "tutti/slot_table.h"

namespace tutti::bindings {

namespace nb = nanobind;

template <typename T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using KeysIn = nb::ndarray<const uint8_t, nb::shape<-1, 32>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
using KeysOut = nb::ndarray<nb::numpy, uint8_t, nb::shape<-1, 32>>;

template <typename T>
std::vector<T> to_vector(const In<T>& array) {
  return std::vector<T>(array.data(), array.data() + array.shape(0));
}

template <typename T>
std::span<const T> to_span(const In<T>& array) {
  return {array.data(), array.shape(0)};
}

inline std::span<const Key> to_keys(const KeysIn& keys) {
  return {reinterpret_cast<const Key*>(keys.data()), keys.shape(0)};
}

template <typename T>
Out<T> to_numpy(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  const nb::capsule owner(owned, [](void* at) noexcept { delete static_cast<std::vector<T>*>(at); });
  return Out<T>(owned->data(), {owned->size()}, owner);
}

inline KeysOut to_numpy_keys(std::vector<Key> keys) {
  auto* owned = new std::vector<Key>(std::move(keys));
  const nb::capsule owner(owned, [](void* at) noexcept { delete static_cast<std::vector<Key>*>(at); });
  return KeysOut(owned->empty() ? nullptr : owned->data()->data(), {owned->size(), 32}, owner);
}

void bind_index(nb::module_& module);
void bind_holders(nb::module_& module);
void bind_io(nb::module_& module);
void bind_gds(nb::module_& module);
void bind_partition(nb::module_& module);

}  // namespace tutti::bindings
