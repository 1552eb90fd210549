// A library to preload: appends every error Status that a process makes, and the text of every other
// exception that forebay throws, to the file in FOREBAY_MESSAGE_LOG. A line is the code or the exception's
// type, the program or library that made it, FOREBAY_MESSAGE_TEST and the message, with tabs between and line
// ends as
// "\n". tests/text/list_messages.py builds and uses it.
//
// It defines Status's constructor and with_context in place of libforebay-core's, and wraps __cxa_throw. An
// Error has a Status, which is recorded already. The C interface throws a type of its own where it was called
// wrongly.

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <string_view>
#include <typeinfo>

#include "forebay/status.h"

namespace {

// Longer messages are cut. A longer line might be torn apart when several processes append.
constexpr std::size_t kLineBytesMax = 4000;

// Without allocations: the message may come from inside an allocation call.
struct Line {
  char bytes[kLineBytesMax];
  std::size_t size = 0;

  void add(std::string_view text) {
    for (const char letter : text) {
      if (size + 3 > kLineBytesMax) return;
      if (letter == '\n' || letter == '\t') {
        bytes[size++] = '\\';
        bytes[size++] = letter == '\n' ? 'n' : 't';
      } else {
        bytes[size++] = letter;
      }
    }
  }
  void end_field(char end) { bytes[size++] = end; }
};

void record(const char* code, std::string_view message, const void* caller) {
  const char* const path = std::getenv("FOREBAY_MESSAGE_LOG");
  if (path == nullptr) return;
  const char* const test = std::getenv("FOREBAY_MESSAGE_TEST");
  Dl_info object{};
  const bool is_known = ::dladdr(caller, &object) != 0 && object.dli_fname != nullptr;
  const char* const slash = is_known ? std::strrchr(object.dli_fname, '/') : nullptr;
  Line line;
  line.add(code);
  line.end_field('\t');
  line.add(!is_known ? "?" : slash != nullptr ? slash + 1 : object.dli_fname);
  line.end_field('\t');
  line.add(test != nullptr ? test : "?");
  line.end_field('\t');
  line.add(message);
  line.end_field('\n');
  const int file = ::open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0) return;
  static_cast<void>(!::write(file, line.bytes, line.size));
  ::close(file);
}

void record(forebay::StatusCode code, std::string_view message, const void* caller) {
  if (code != forebay::StatusCode::kOk) record(forebay::status_code_name(code), message, caller);
}

}  // namespace

extern "C" [[noreturn]] void __cxa_throw(void* object, void* type_pointer, void (*destroy)(void*)) {
  const auto* const type = static_cast<const std::type_info*>(type_pointer);
  const std::string_view name = type->name();
  void* base = object;
  if (name.find("forebay") != name.npos && name != "N7forebay5ErrorE" &&
      typeid(std::exception).__do_catch(type, &base, 1)) {
    record(type->name(), static_cast<const std::exception*>(base)->what(), __builtin_return_address(0));
  }
  using Throw = void (*)(void*, void*, void (*)(void*));
  static const Throw next = reinterpret_cast<Throw>(::dlsym(RTLD_NEXT, "__cxa_throw"));
  next(object, type_pointer, destroy);
  __builtin_unreachable();
}

namespace forebay {

Status::Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {
  record(code_, message_, __builtin_return_address(0));
}

Status Status::with_context(const std::string& context) const {
  if (ok()) return *this;
  Status status;
  status.code_ = code_;
  status.message_ = context + ": " + message_;
  record(status.code_, status.message_, __builtin_return_address(0));
  return status;
}

}  // namespace forebay
