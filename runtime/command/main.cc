// The program `forebay`.

extern "C" int forebay_command_main(int argc, char** argv);

int main(int argc, char** argv) {
  return forebay_command_main(argc, argv);
}
