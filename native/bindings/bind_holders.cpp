#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <stdexcept>

#include "arrays.h"
#include "tutti/holder_index.h"

namespace tutti::bindings {
namespace {

NamespaceName to_name(const nb::bytes& name) {
  NamespaceName result;
  if (name.size() != result.size()) {
    throw std::invalid_argument("a namespace has 16 bytes");
  }
  std::copy_n(reinterpret_cast<const uint8_t*>(name.c_str()), result.size(), result.begin());
  return result;
}

void put(HolderIndex& index, uint32_t incarnation, uint64_t number, const nb::bytes& name, uint32_t start,
         uint64_t parent, const In<uint64_t>& hashes) {
  const SpanContent content{to_name(name), start, parent, to_span(hashes)};
  if (content.hashes.empty() || content.hashes.size() > kMostSpanBlocks) {
    throw std::invalid_argument("a span has 1 to 1024 blocks");
  }
  const nb::gil_scoped_release release;
  index.put(incarnation, number, content);
}

nb::tuple holders(const HolderIndex& index, const nb::bytes& name, const In<uint64_t>& hashes) {
  const NamespaceName wanted = to_name(name);
  std::vector<uint32_t> incarnations, blocks;
  {
    const nb::gil_scoped_release release;
    for (const Holder& one : index.holders(wanted, to_span(hashes))) {
      incarnations.push_back(one.incarnation);
      blocks.push_back(one.blocks);
    }
  }
  return nb::make_tuple(to_numpy(std::move(incarnations)), to_numpy(std::move(blocks)));
}

nb::list spans(const HolderIndex& index, uint64_t first, uint64_t count) {
  nb::list result;
  for (const KeptSpan& one : index.spans(first, count)) {
    const nb::bytes name(one.kept.name.data(), one.kept.name.size());
    result.append(nb::make_tuple(one.incarnation, one.number, one.blocks, name, one.kept.start, one.kept.parent,
                                 to_numpy(std::vector<uint64_t>(one.kept.hashes.begin(), one.kept.hashes.end()))));
  }
  return result;
}

}  // namespace

void bind_holders(nb::module_& module) {
  nb::class_<HolderIndex>(module, "HolderIndex",
                          "Which incarnations of nodes hold which blocks, in bounded memory. Not thread-safe.")
      .def(nb::init<uint64_t>(), nb::arg("most_bytes"))
      .def("set_alive", &HolderIndex::set_alive, nb::arg("incarnation"), nb::arg("alive"))
      .def("spans_of", &HolderIndex::spans_of, nb::arg("incarnation"))
      .def("put", &put, nb::arg("incarnation"), nb::arg("number"), nb::arg("namespace_id"), nb::arg("start"),
           nb::arg("parent"), nb::arg("hashes"), "In the place of a span of that name.")
      .def("remove", &HolderIndex::remove, nb::arg("incarnation"), nb::arg("number"),
           nb::call_guard<nb::gil_scoped_release>(), "Whether it was there.")
      .def("begin_snapshot", &HolderIndex::begin_snapshot)
      .def("sweep", &HolderIndex::sweep, nb::arg("first"), nb::arg("count"), nb::call_guard<nb::gil_scoped_release>(),
           "Removes what wasn't put since begin_snapshot, of `count` places; whether there are more behind them.")
      .def("holders", &holders, nb::arg("namespace_id"), nb::arg("hashes"),
           "Incarnations that are alive and hold hashes[0], and how many from there on, an array each.")
      .def("spans", &spans, nb::arg("first"), nb::arg("count"),
           "(incarnation, number, blocks, namespace, start, parent, hashes that are kept) of the spans at `count` "
           "places.")
      .def_prop_ro("places", &HolderIndex::places)
      .def("counts",
           [](const HolderIndex& index) {
             const HolderCounts counts = index.counts();
             nb::dict result;
             result["spans"] = counts.spans;
             result["kept_blocks"] = counts.kept_blocks;
             result["distinct_blocks"] = counts.distinct_blocks;
             result["left_out_blocks"] = counts.left_out_blocks;
             return result;
           })
      .def_prop_ro("used_bytes", &HolderIndex::used_bytes, "What the bound is for.")
      .def_prop_ro("memory_bytes", &HolderIndex::memory_bytes, "What is allocated.");
}

}  // namespace tutti::bindings
