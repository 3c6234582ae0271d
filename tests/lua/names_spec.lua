-- Strategies are Lua alone: no C file names one of them or an axis, and each of the library's can be taken away.
local support = require "support"

describe("no file under runtime/ or lua/ names", function()
  local words = { "data", "tensor", "pipeline", "sequence", "zero", "local_sgd", "ddp", "fsdp", "hsdp", "moe", "diloco" }
  for _, word in ipairs(words) do
    it(("an axis or a strategy %q"):format(word), function()
      -- a text of that name alone, but for the class and the constructor of tensors and the keys of a schedule's options
      local other = [[dtl_tensor_from|"tensor", l_tensor|"optimizer state" : "tensor"|\{"pipeline", .v.]]
      local code, text = support.sh(("grep -rnE '\"%s\"' runtime lua --include=*.c --include=*.h | grep -vE '%s'"):format(word, other))
      assert.are.equal(1, code, text)
    end)
  end
end)

describe("without", function()
  local jobs = {
    data = "", zero = "", local_sgd = "", recompute = "", tensor = "--parallel zero=1", pipeline = "--parallel zero=2",
  }
  for _, name in ipairs { "data", "zero", "local_sgd", "tensor", "pipeline", "recompute" } do
    it(name .. ".lua the others work", function()
      local dir = support.folder()
      assert(support.sh(("cp -r stdlib %s/ && rm %s/stdlib/strategy/%s.lua"):format(dir, dir, name)) == 0)
      local script = name == "data" and "examples/strategies/ddp_from_scratch.lua" or "examples/strategies/zero3.lua"
      local words = name == "zero" and "--parallel none" or jobs[name]
      local code, text = support.run(("%s --steps 1 %s"):format(script, words), { ranks = 2, env = "DTRAIN_STDLIB=" .. dir ..
        "/stdlib", seconds = 120 })
      assert.are.equal(0, code, text)
      assert.is_truthy(text:find "step 1/1", text)
    end)
  end
end)
