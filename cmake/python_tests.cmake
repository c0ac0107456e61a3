# The tests that run in Python, with the PyTorch that LibTorch was taken from. They need nothing else.
add_executable(godwit_gradients tests/tools/gradients.cpp)
target_include_directories(godwit_gradients PRIVATE ${CMAKE_SOURCE_DIR})
target_link_libraries(godwit_gradients PRIVATE godwit_model)
godwit_use_pch(godwit_gradients)

foreach(python ${CMAKE_SOURCE_DIR}/.venv/bin/python3 python3)
  execute_process(COMMAND ${python} -c "import torch" RESULT_VARIABLE rc OUTPUT_QUIET ERROR_QUIET)
  if(rc EQUAL 0)
    set(GODWIT_PYTHON ${python})
    break()
  endif()
endforeach()

add_executable(godwit_random_model tests/tools/random_model.cpp)
target_include_directories(godwit_random_model PRIVATE ${CMAKE_SOURCE_DIR})
target_link_libraries(godwit_random_model PRIVATE godwit_model godwit_text)
godwit_use_pch(godwit_random_model)
add_executable(schema_samples tests/tools/schema_samples.cpp)
target_link_libraries(schema_samples PRIVATE godwit_text)

# godwit_python_test(name): tests/python/<name>_test.py, a plain unittest program.
function(godwit_python_test name)
  add_test(NAME python_${name} COMMAND ${GODWIT_PYTHON} ${CMAKE_SOURCE_DIR}/tests/python/${name}_test.py)
  set_tests_properties(python_${name} PROPERTIES TIMEOUT 600
    ENVIRONMENT "OMP_WAIT_POLICY=passive;OMP_NUM_THREADS=2;GODWIT_BUILD=${CMAKE_BINARY_DIR};PYTHONDONTWRITEBYTECODE=1")
endfunction()

if(GODWIT_PYTHON)
  file(GLOB python_tests CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/python/*_test.py)
  foreach(path ${python_tests})
    get_filename_component(name ${path} NAME_WE)
    string(REGEX REPLACE "_test$" "" name ${name})
    godwit_python_test(${name})
  endforeach()
else()
  message(WARNING "no Python with torch found: tests/python is not run")
endif()
