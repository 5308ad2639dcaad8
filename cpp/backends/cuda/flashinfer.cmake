# FlashAttention-3 from FlashInfer's headers, for sm_90a only. Without them the own kernels do all of attention.
set(MAGA_FLASHINFER AUTO CACHE STRING "Use FlashInfer's headers: ON, OFF, or AUTO where they are found or can be fetched")
set(MAGA_HEADERS "" CACHE PATH "Folder into which flashinfer-python 0.6.6 was installed; empty: fetched with pip")

function(add_flashinfer target)
  if(MAGA_FLASHINFER STREQUAL "OFF" OR NOT "90a" IN_LIST CUDA_ARCHS)
    return()
  endif()
  set(headers "${MAGA_HEADERS}")
  if(NOT headers)
    set(headers ${CMAKE_BINARY_DIR}/_headers)
    if(NOT EXISTS ${headers}/flashinfer)
      find_package(Python COMPONENTS Interpreter REQUIRED)
      execute_process(COMMAND ${Python_EXECUTABLE} -m pip install --quiet --no-deps --target ${headers} --require-hashes
                              -r ${CMAKE_SOURCE_DIR}/third_party/requirements-headers.txt
                      RESULT_VARIABLE failed ERROR_VARIABLE why)
      if(failed)
        message(STATUS "FlashInfer's headers could not be fetched: ${why}")
      endif()
    endif()
  endif()
  set(data ${headers}/flashinfer/data)
  if(NOT EXISTS ${data}/include/flashinfer/attention/hopper/prefill_sm90.cuh)
    if(MAGA_FLASHINFER STREQUAL "ON")
      message(FATAL_ERROR "MAGA_FLASHINFER=ON, but ${headers} holds no FlashInfer: set MAGA_HEADERS, or MAGA_FLASHINFER=OFF")
    endif()
    message(STATUS "Building without FlashInfer: long prompts will be slower on sm_90")
    return()
  endif()

  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/attention_fa3_hd*.cu)
  add_library(maga_cuda_fa3 OBJECT ${sources})
  set_target_properties(maga_cuda_fa3 PROPERTIES
                        CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_ARCHITECTURES 90a CUDA_VISIBILITY_PRESET hidden
                        POSITION_INDEPENDENT_CODE ON JOB_POOL_COMPILE heavy)
  target_compile_options(maga_cuda_fa3 PRIVATE -DNDEBUG --expt-relaxed-constexpr)
  target_include_directories(maga_cuda_fa3 PRIVATE ${CMAKE_SOURCE_DIR}/cpp)
  target_include_directories(maga_cuda_fa3 SYSTEM PRIVATE ${data}/include ${data}/cutlass/include)
  target_compile_definitions(${target} PRIVATE MAGA_FLASHINFER)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:maga_cuda_fa3>)
endfunction()
# A unit of FlashInfer takes 3 GB to compile.
set_property(GLOBAL APPEND PROPERTY JOB_POOLS heavy=2)
