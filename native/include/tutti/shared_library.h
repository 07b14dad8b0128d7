// A vendor's library found at run time, so that this package builds, imports and runs on machines that have none.
//
// Invariant: what was loaded stays loaded until the process ends. Drivers start threads and register handlers for exit;
// unloading them is not safe, and another user of the library (PyTorch) holds it anyway.
#pragma once

#include <dlfcn.h>

#include <string>

namespace tutti {

class SharedLibrary {
 public:
  // `name`: a path, or a name that the dynamic linker looks for. Check loaded() before anything else.
  explicit SharedLibrary(const std::string& name) : at_(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)) {
    if (at_ == nullptr) {
      const char* why = dlerror();
      error_ = why != nullptr ? why : name + " can't be loaded";
    }
  }
  ~SharedLibrary() {
    if (at_ != nullptr) {
      dlclose(at_);
    }
  }
  SharedLibrary(const SharedLibrary&) = delete;
  SharedLibrary& operator=(const SharedLibrary&) = delete;

  [[nodiscard]] bool loaded() const noexcept { return at_ != nullptr; }
  // Why it isn't loaded; the dynamic linker's words.
  [[nodiscard]] const std::string& error() const noexcept { return error_; }

  // Sets `function` to the symbol; false where there is none.
  template <typename Function>
  bool find(const char* symbol, Function*& function) const noexcept {
    function = reinterpret_cast<Function*>(dlsym(at_, symbol));
    return function != nullptr;
  }

 private:
  void* at_;
  std::string error_;
};

}  // namespace tutti
