-- Strategies are Lua alone: no C file names one of them or an axis, and each of the library's can be taken away.
require "dtrain" -- opens the searcher of what follows
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

describe("a strategy of the library", function()
  for _, name in ipairs { "data", "zero", "local_sgd", "tensor", "pipeline", "recompute" } do
    it(name .. ".lua has at most 80 lines of code", function()
      local n = 0
      for line in io.lines("stdlib/strategy/" .. name .. ".lua") do
        if line:find "%S" and not line:find "^%s*%-%-" then n = n + 1 end
      end
      assert.is_true(n <= 80, n)
    end)
  end

  it("is made of the verbs that docs/parallelism.md shows", function()
    local rows, shown = support.read "docs/parallelism.md":match "| verb | decides | example |(.-)\n\n", {}
    local verbs = require "dtrain.strategy".verbs
    for row in rows:gmatch "\n| (`[^|]+) |[^|]+|[^|]+|" do
      for verb in row:gmatch "`([%a]+)" do shown[verb] = true end
    end
    for _, verb in ipairs(verbs) do assert.is_true(shown[verb], verb .. " is in no row of the table of verbs") end
    for _, name in ipairs { "data", "zero", "local_sgd", "tensor", "pipeline", "recompute" } do
      local known = {}
      for _, verb in ipairs(verbs) do known[verb] = true end
      for key in pairs(require("dtrain.strategy." .. name)) do assert.is_true(known[key], name .. " has " .. key) end
    end
  end)
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
