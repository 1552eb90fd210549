// A program with a sanitizer in it, which puts functions of its own in the C library's place and looks the
// real ones up by dlsym before anything else works.
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

int main(int argc, char** argv) {
  std::string text = argc > 1 ? argv[1] : "";
  std::thread([&] { text += std::strcmp(text.c_str(), "a") == 0 ? " and b" : " and nothing else"; }).join();
  std::printf("%s\n", text.c_str());
  return 3;
}
