# Compiles trainer.rs and runs it.
cmake_minimum_required(VERSION 3.25)
if(NOT RUSTC OR NOT EXISTS "${RUSTC}")
  message("Skipped: there is no rustc here, so the interface was not called from Rust")
  return()
endif()
execute_process(COMMAND "${RUSTC}" -O "${CMAKE_CURRENT_LIST_DIR}/trainer.rs" -o "${WORK}/trainer_rs" -L "${LIBRARY}"
  -C "link-arg=-Wl,-rpath,${LIBRARY}" COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${WORK}/trainer_rs" COMMAND_ERROR_IS_FATAL ANY)
