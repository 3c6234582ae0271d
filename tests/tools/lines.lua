-- busted's output in the form of tests/c/t.h: "ok name", "FAIL name", "skip name: reason", and the closing line that
-- tests/run adds up. Use: busted -o tests/tools/lines.lua some_spec.lua
return function()
  local busted = require "busted"
  local handler = require "busted.outputHandlers.base"()
  local passed, failed, skipped = 0, 0, 0

  local function say(fmt, ...)
    io.stdout:write(fmt:format(...), "\n")
    io.stdout:flush()
  end
  local function text(t)
    local message = t.message
    if type(message) ~= "string" then message = message == nil and "no message" or require("pl.pretty").write(message) end
    return (message:gsub("\n", "\n  "))
  end
  local function fail(t)
    failed = failed + 1
    local at = t.element.trace or {}
    say("  %s:%s: %s", at.short_src or "?", at.currentline or "?", text(t))
    say("FAIL %s", t.name or "?")
  end

  busted.subscribe({ "test", "end" }, function(_, _, status)
    if status == "success" then
      passed = passed + 1
      say("ok %s", handler.successes[#handler.successes].name)
    elseif status == "pending" then
      skipped = skipped + 1
      local t = handler.pendings[#handler.pendings]
      say("skip %s: %s", t.name, t.message and text(t) or "no reason given")
    elseif status == "failure" then
      fail(handler.failures[#handler.failures])
    elseif status == "error" then
      fail(handler.errors[#handler.errors])
    end
    return nil, true
  end, { predicate = handler.cancelOnPending })
  -- an error outside any test: a file that does not load, a setup that breaks
  busted.subscribe({ "error" }, function(element)
    if element.descriptor ~= "it" then fail(handler.errors[#handler.errors]) end
    return nil, true
  end)
  busted.subscribe({ "suite", "end" }, function()
    say("%d passed, %d failed, %d skipped", passed, failed, skipped)
    return nil, true
  end)
  return handler
end
