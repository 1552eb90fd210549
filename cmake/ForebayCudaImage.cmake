# forebay_cuda_image: CUDA kernels compiled to one image, and taken into a library as data.

# How device code is compiled. The arithmetic of the kernels to the bit: only written fused multiply-adds, IEEE divide and
# square root, subnormals kept.
set(FOREBAY_NVCC_FLAGS -std=c++20 -O3 -fmad=false -prec-div=true -prec-sqrt=true -ftz=false
  -Werror all-warnings -ccbin "${FOREBAY_NVCC_HOST_COMPILER}")

# The generated code: one image for each architecture, and PTX for later devices.
set(FOREBAY_NVCC_CODE "")
set(FOREBAY_NVCC_TARGETS "")
foreach(architecture IN LISTS FOREBAY_NVCC_ARCHITECTURES)
  list(APPEND FOREBAY_NVCC_CODE "-gencode=arch=compute_${architecture},code=sm_${architecture}")
  string(APPEND FOREBAY_NVCC_TARGETS "sm_${architecture} ")
endforeach()
if(FOREBAY_NVCC_ARCHITECTURES)
  set(virtual compute_${FOREBAY_NVCC_PTX_ARCHITECTURE})
  list(APPEND FOREBAY_NVCC_CODE "-gencode=arch=${virtual},code=${virtual}")
  string(APPEND FOREBAY_NVCC_TARGETS "and PTX ${virtual}, CUDA ${FOREBAY_NVCC_VERSION}")
endif()

# forebay_cuda_image(name SOURCE kernels.cu EMBED image_compiled.cc [INCLUDES dir ...])
# Compiles SOURCE with nvcc to name.fatbin in the binary directory, beside name.fatbin.txt with the registers and the stack
# of every kernel. EMBED, a source of a target in the same directory,
# gets two macros: FOREBAY_KERNEL_IMAGE, the file for .incbin, and FOREBAY_KERNEL_TARGETS, the list of architectures.
# Requires FOREBAY_HAVE_NVCC.
function(forebay_cuda_image name)
  cmake_parse_arguments(ARG "" "SOURCE;EMBED" "INCLUDES" ${ARGN})
  set(image "${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin")
  set(source "${CMAKE_CURRENT_SOURCE_DIR}/${ARG_SOURCE}")
  list(TRANSFORM ARG_INCLUDES PREPEND "-I")
  add_custom_command(OUTPUT "${image}"
    COMMAND "${CMAKE_COMMAND}" -D "REPORT=${image}.txt" -P "${PROJECT_SOURCE_DIR}/cmake/CompileCudaImage.cmake" --
      "${FOREBAY_NVCC}" -fatbin ${FOREBAY_NVCC_FLAGS} ${FOREBAY_NVCC_CODE} ${ARG_INCLUDES} --threads 2 -Xptxas -v -MD -MF "${image}.d" "${source}" -o "${image}"
    BYPRODUCTS "${image}.txt"
    DEPENDS "${source}" "${FOREBAY_NVCC}" "${PROJECT_SOURCE_DIR}/cmake/CompileCudaImage.cmake"
    DEPFILE "${image}.d"
    COMMENT "Compiling CUDA kernels ${name} for ${FOREBAY_NVCC_TARGETS}"
    VERBATIM)
  # The assembler takes the image in, which the compiler's own dependencies do not tell.
  set_source_files_properties("${ARG_EMBED}" PROPERTIES
    OBJECT_DEPENDS "${image}"
    COMPILE_DEFINITIONS "FOREBAY_KERNEL_IMAGE=\"${image}\";FOREBAY_KERNEL_TARGETS=\"${FOREBAY_NVCC_TARGETS}\"")
endfunction()
