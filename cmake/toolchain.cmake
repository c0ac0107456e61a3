# Compiler cache, fast linker, warnings, sanitizers, CUDA.
find_program(CCACHE ccache)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Precompiled headers are cached only with these two allowances.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()
find_program(MOLD mold)
if(MOLD)
  add_link_options(-fuse-ld=mold)
endif()
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wall> $<$<COMPILE_LANGUAGE:CXX>:-Wextra>
                    $<$<COMPILE_LANGUAGE:CXX>:-fno-math-errno> $<$<COMPILE_LANGUAGE:CXX>:-fno-trapping-math>)
if(GODWIT_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined> $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
                      $<$<COMPILE_LANGUAGE:CXX>:-g1>)
  add_link_options(-fsanitize=address,undefined)
endif()

if(GODWIT_CUDA STREQUAL "AUTO")
  find_program(NVCC nvcc PATHS /usr/local/cuda/bin)
  if(NVCC)
    set(GODWIT_WITH_CUDA ON)
  else()
    set(GODWIT_WITH_CUDA OFF)
  endif()
else()
  set(GODWIT_WITH_CUDA ${GODWIT_CUDA})
endif()
if(GODWIT_WITH_CUDA)
  if(NOT CMAKE_CUDA_COMPILER AND NVCC)
    set(CMAKE_CUDA_COMPILER ${NVCC})
  endif()
  set(CMAKE_CUDA_ARCHITECTURES 90a CACHE STRING "")  # wgmma and setmaxnreg exist only for sm_90a
  set(CMAKE_CUDA_STANDARD 20)
  enable_language(CUDA)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc takes it
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  find_package(CUDAToolkit REQUIRED)
endif()

# The PyTorch wheels export parts of an older libstdc++ (std::filesystem), with which an object of ours crashes. So the
# system's own comes first, for the linker and at run time; by file name, as -lstdc++ may mean an archive.
if(UNIX AND NOT APPLE)
  add_link_options(LINKER:--push-state,--no-as-needed -l:libstdc++.so.6 LINKER:--pop-state)
endif()
