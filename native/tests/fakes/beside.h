// Reaches a stand-in library that was built beside the test: its path for the code under test, its commands for the
// test.
#pragma once

#include <dlfcn.h>

#include <filesystem>
#include <string>

#include "../check.h"

namespace tutti::testing {

// "fake_x" -> the path of libfake_x.so in the folder of this test's executable.
inline std::string library_beside(const std::string& name) {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / ("lib" + name + ".so");
}

// A function of the same instance of the library that the code under test loads.
template <typename Function>
void command(const std::string& library, const char* name, Function*& function) {
  void* at = dlopen(library.c_str(), RTLD_NOW);
  CHECK(at != nullptr);
  function = reinterpret_cast<Function*>(dlsym(at, name));
  CHECK(function != nullptr);
}

}  // namespace tutti::testing
